"""Convert a release of LLaVA-OneVision (lmms-lab's format) to a checkpoint of transformers' own class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
)

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.models.conversations import TAGGED, template_of
from espalier.harness.models.llava_onevision import LlavaOnevisionAdapter
from espalier.harness.models.loader import pretrained, require_settings
from espalier.harness.tools.convert.checkpoint_writer import (
    Release,
    Say,
    check_tokens,
    command_line,
    open_release,
    write_checkpoint,
)
from espalier.harness.tools.convert.convert_llava import (
    INSIDE,
    SETTINGS,
    padded_rows,
    rename_llava,
    text_of,
    tower_of,
)

KIND = "LLaVA-OneVision"

#: Settings that a release must have besides those of every release in LLaVA's format.
_FIXED = {
    "mm_spatial_pool_mode": "bilinear",
    "mm_newline_position": "one_token",
    "mm_spatial_pool_stride": 2,
    "mm_patch_merge_type": "spatial_unpad",
}

#: SigLIP so400m has 16 heads; no tensor shows it.
_TOWER_HEADS = 16


def read_tokenizer(release: Release) -> Any:
    """Return the release's tokenizer with the two placeholders.

    Raises:
        UserError: it is missing or does not parse.
    """
    try:
        # The release's own configuration class is not part of transformers.
        tokenizer = pretrained(AutoTokenizer, release.folder, config=Qwen2Config())
    except FOREIGN as error:
        raise UserError(f"{str(release.folder)!r}: no usable tokenizer ({error})") from error
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<image>", "<video>")],
        special_tokens=True,
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def configuration(release: Release, tokenizer: Any) -> Any:
    """Return the model's configuration.

    Args:
        release: the release.
        tokenizer: with the two placeholders.

    Raises:
        UserError: it is not a release of LLaVA-OneVision, or one that the library's modules compute differently.
    """
    config = release.config
    require_settings(config, {**SETTINGS, **_FIXED}, "converted")
    for key in ("image_grid_pinpoints", "rope_theta"):
        if key not in config:
            raise UserError(f"this is not a release of {KIND}: config.json has no {key!r}")
    pinpoints = config["image_grid_pinpoints"]
    if not isinstance(pinpoints, list):
        raise UserError(
            f"config.json: image_grid_pinpoints={pinpoints!r} cannot be converted; valid: a list of sizes in pixels"
        )
    text = text_of(config, release.shapes, KIND, "qwen2", tokenizer.pad_token_id)
    check_tokens(len(tokenizer), text["vocab_size"])
    return LlavaOnevisionConfig(
        text_config=text,
        vision_config={
            "model_type": "siglip_vision_model",
            **tower_of(release.shapes, INSIDE, KIND, config.get("mm_vision_tower")),
            "num_attention_heads": _TOWER_HEADS,
            "vision_use_head": False,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio=config.get("image_aspect_ratio", "anyres_max_9"),
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def generation_of(config: Mapping[str, Any], tokenizer: Any) -> GenerationConfig:
    """Return greedy settings: the end of a turn and the end of a text both end an answer."""
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    return GenerationConfig(
        bos_token_id=config["bos_token_id"],
        eos_token_id=sorted(ends - {None}) or config["eos_token_id"],
        pad_token_id=tokenizer.pad_token_id,
    )


def convert(source: Path, target: Path, say: Say) -> None:
    """Write a checkpoint that the OneVision models load with model.path=<target>.

    Args:
        source: directory of the release: config.json, tokenizer, safetensors shards.
        target: directory to write, new or empty.
        say: called with progress lines.

    Raises:
        UserError: the release is incomplete, holds unknown tensors, or `target` is in use.
    """
    release = open_release(source, target)
    tokenizer = read_tokenizer(release)
    config = configuration(release, tokenizer)
    # As many rows as in transformers' own checkpoints, which the model files state.
    rows = padded_rows(config.text_config.vocab_size)
    config.text_config.vocab_size = rows
    processor = LlavaOnevisionAdapter.built_processor(config, tokenizer)
    processor.chat_template = template_of("qwen_1_5", TAGGED)
    write_checkpoint(
        release,
        target,
        say,
        model_class=LlavaOnevisionForConditionalGeneration,
        config=config,
        processor=processor,
        generation=generation_of(release.config, tokenizer),
        rename=partial(rename_llava, rows=rows),
    )


#: Runs the command line.
main = command_line(
    "llava_onevision", __doc__, convert, "/models/llava-onevision-qwen2-7b-ov /models/llava_ov_7b"
)
