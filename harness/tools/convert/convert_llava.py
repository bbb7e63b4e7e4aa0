"""Convert a release of LLaVA-1.5 or LLaVA-1.6 (liuhaotian's format) to a checkpoint of transformers' own class.

LLaVA-1.5 does not hold its vision tower: --tower gives a folder of openai/clip-vit-large-patch14-336.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
)

from espalier.harness.errors import UserError
from espalier.harness.models.conversations import TAGGED, template_of
from espalier.harness.specs.commands import command_parser
from espalier.harness.tools.convert.checkpoint_writer import (
    Checkpoint,
    Release,
    Say,
    check_tokens,
    open_release,
    require_settings,
    run_conversion,
    write_checkpoint,
)
from espalier.harness.tools.convert.llava_release import (
    ALONE,
    INSIDE,
    SETTINGS,
    padded_rows,
    rename_llava,
    rename_tower,
    text_of,
    tower_of,
)
from espalier.harness.tools.convert.llava_tokens import IMAGE, read_tokenizer
from espalier.harness.tools.convert.shards import Parts, Shape, shapes_of, shards_of

KIND = "LLaVA"

#: Text stacks by the release's class.
_STACKS = {"LlavaLlamaForCausalLM": "llama", "LlavaMistralForCausalLM": "mistral"}

#: Width of a head of CLIP's towers, which no tensor shows.
_HEAD_WIDTH = 64


def convert(source: Path, target: Path, say: Say, tower: Path | None = None) -> None:
    """Write a checkpoint that the LLaVA models load with model.path=<target>.

    Args:
        source: directory of the release: config.json, tokenizer, weights in safetensors or in PyTorch's format.
        target: directory to write, new or empty.
        say: called with progress lines.
        tower: directory of the CLIP checkpoint, for a release without its vision tower.

    Raises:
        UserError: the release is incomplete, holds unknown tensors, or `target` is in use.
    """
    release = open_release(source, target)
    stack, crops = _stack(release.config), _has_crops(release.config)
    shards = _tower_shards(release, tower)
    shapes = {**release.shapes, **shapes_of(shards)}
    prefix = ALONE if shards else INSIDE
    tokenizer = read_tokenizer(source)
    config = configuration(release.config, shapes, prefix, tokenizer)
    rows = config.text_config.vocab_size
    check_tokens(len(tokenizer), rows)
    vision = config.vision_config
    pinpoints: dict[str, Any] = {}
    if crops:
        pinpoints["image_grid_pinpoints"] = config.image_grid_pinpoints
    side = vision.image_size
    sizes: dict[str, Any] = {
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    padded = release.config.get("image_aspect_ratio") == "pad"
    processor = (LlavaNextProcessor if crops else LlavaProcessor)(
        image_processor=LlavaNextImageProcessor(**sizes, **pinpoints)
        if crops
        else LlavaImageProcessor(**sizes, do_pad=padded),
        tokenizer=tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=template_of(_frame(stack, tokenizer), TAGGED),
    )

    def rename(name: str) -> str | Parts | None:
        return rename_tower(name) if shards and _of_tower(name) else rename_llava(name, rows)

    checkpoint = Checkpoint(
        model_class=LlavaNextForConditionalGeneration if crops else LlavaForConditionalGeneration,
        config=config,
        processor=processor,
        generation=GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        rename=rename,
    )
    write_checkpoint(release, checkpoint, target, say, shards)


def configuration(
    release: Mapping[str, Any], shapes: Mapping[str, Shape], prefix: str, tokenizer: Any
) -> Any:
    """Return the model's configuration.

    Args:
        release: the release's config.json.
        shapes: of its tensors and of a separate tower.
        prefix: before the tower's names.
        tokenizer: with the placeholder and a padding token.

    Raises:
        UserError: it is not a release of LLaVA, or one that the library's modules compute differently.
    """
    crops, stack = _has_crops(release), _stack(release)
    require_settings(release, SETTINGS)
    vision = tower_of(shapes, prefix, KIND, release.get("mm_vision_tower"))
    text = text_of(release, shapes, KIND, stack, tokenizer.pad_token_id)
    return (LlavaNextConfig if crops else LlavaConfig)(
        # As many rows as in transformers' own checkpoints, which the model files state.
        text_config={**text, "vocab_size": padded_rows(text["vocab_size"])},
        vision_config={
            "model_type": "clip_vision_model",
            **vision,
            "num_attention_heads": vision["hidden_size"] // _HEAD_WIDTH,
        },
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(vision["image_size"] // vision["patch_size"]) ** 2,
        tie_word_embeddings=text["tie_word_embeddings"],
        **({"image_grid_pinpoints": release["image_grid_pinpoints"]} if crops else {}),
    )


def _has_crops(config: Mapping[str, Any]) -> bool:
    """Return whether pictures are cut into crops, as in LLaVA-1.6.

    Raises:
        UserError: another layout of views.
    """
    ratio, merge = config.get("image_aspect_ratio"), config.get("mm_patch_merge_type", "flat")
    if (ratio, merge) == ("anyres", "spatial_unpad") and "image_grid_pinpoints" in config:
        return True
    if ratio in ("pad", "square", None) and merge == "flat":
        return False
    raise UserError(
        f"config.json: image_aspect_ratio={ratio!r} with mm_patch_merge_type={merge!r} cannot be converted; "
        "valid: 'pad' with 'flat' (LLaVA-1.5), 'anyres' with 'spatial_unpad' and image_grid_pinpoints (LLaVA-1.6)"
    )


def _stack(config: Mapping[str, Any]) -> str:
    """Return the text stack's type in the library.

    Raises:
        UserError: a class of another release.
    """
    names = config.get("architectures") or [None]
    if names[0] not in _STACKS:
        raise UserError(
            f"config.json: architectures={names[0]!r} cannot be converted; valid: {', '.join(_STACKS)}, or the "
            "command of another format (espalier convert --help)"
        )
    if config.get("sliding_window"):
        raise UserError(
            f"config.json: sliding_window={config['sliding_window']!r} cannot be converted; valid: full attention"
        )
    return _STACKS[names[0]]


def _tower_shards(release: Release, tower: Path | None) -> Sequence[Path]:
    """Return the weight files of a tower beside the release; empty if the release holds one.

    Raises:
        UserError: the tower is in neither place, or in both.
    """
    has_tower = any(name.startswith(INSIDE) for name in release.shapes)
    if has_tower and tower is not None:
        raise UserError("--tower: the release holds its own vision tower; valid: no --tower")
    if has_tower:
        return ()
    if tower is None:
        name = release.config.get("mm_vision_tower")
        raise UserError(
            f"the release does not hold its vision tower ({name}); valid: --tower <folder of {name}>, first, where "
            f"there is a network: hf download {name}"
        )
    return shards_of(tower)


def _of_tower(name: str) -> bool:
    """Return whether a tensor comes from the CLIP checkpoint: no name of a release begins as its names do."""
    return not name.startswith(("model.", "lm_head."))


def _frame(stack: str, tokenizer: Any) -> str:
    """Return the chat format, which LLaVA's code chooses by the name of the release."""
    if stack == "mistral":
        return "mistral_instruct"
    return "chatml_direct" if "<|im_start|>" in tokenizer.get_vocab() else "vicuna_v1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command_parser(
        "convert llava",
        __doc__,
        "/models/llava-v1.6-vicuna-7b /models/llava_next_7b",
        "--tower /models/clip-vit-large-patch14-336 /models/llava-v1.5-7b /models/llava15_7b",
    )
    parser.add_argument("--tower", type=Path, metavar="FOLDER", help="the CLIP checkpoint")
    return run_conversion(parser, convert, arguments)


if __name__ == "__main__":
    sys.exit(main())
