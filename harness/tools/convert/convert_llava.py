"""Convert a release of LLaVA-1.5 or LLaVA-1.6 (liuhaotian's format) to a checkpoint of transformers' own class.

LLaVA-1.5 does not hold its vision tower: --tower gives a folder of openai/clip-vit-large-patch14-336.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from torch import Tensor
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
    PreTrainedTokenizerFast,
)

from espalier.harness.errors import UserError, foreign
from espalier.harness.models.architectures.llava_releases import RENAMES
from espalier.harness.models.build_adapter import HEAD
from espalier.harness.models.conversations import TAGGED, template_of
from espalier.harness.models.loader import pretrained, require_settings
from espalier.harness.tools.convert.checkpoint_writer import (
    Release,
    Say,
    Shape,
    check_tokens,
    command_line,
    lengthened,
    open_release,
    shapes_of,
    shards_of,
    write_checkpoint,
)
from espalier.harness.tools.convert.sentencepiece_tokens import (
    from_pieces,
    read_settings,
    wrapped,
)

#: Names of the tower's tensors in a release that holds one, and in a checkpoint of CLIP.
INSIDE, ALONE = "model.vision_tower.vision_tower.vision_model.", "vision_model."

_WORDS = "model.embed_tokens.weight"

#: Tables that old versions of the library stored, which are computed.
_COMPUTED = (".rotary_emb.inv_freq", ".embeddings.position_ids")

#: Keys of the text stack with the same names in the release's config.json.
_TEXT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "hidden_act"),
)

#: Patch and image size at the end of a tower's name; without the latter it is 224.
_TOWER_NAME = re.compile(r"patch(\d+)(?:-(\d+))?$")

#: Settings that a release must have for the library's modules to compute the same.
SETTINGS = {
    "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": None,
    "mm_use_im_start_end": False,
    "mm_use_im_patch_token": False,
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
    "rope_scaling": None,
    "use_sliding_window": False,
}


def text_of(
    release: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    model_type: str,
    pad: int | None,
) -> dict[str, Any]:
    """Return the configuration of the text stack; its vocabulary is that of the embedding.

    Args:
        release: the release's config.json.
        shapes: of its tensors.
        model_type: the text stack's in the library.
        pad: id of the padding token.

    Raises:
        UserError: config.json lacks a key, or the release the embedding.
    """
    lacking = [name for name in _TEXT if name not in release]
    if lacking:
        raise UserError(f"this is not a release of LLaVA: config.json has no {lacking[0]!r}")
    require_tensors(shapes, [_WORDS])
    # Absent in the oldest releases, which have the library's default.
    theta = float(release.get("rope_theta", 10000.0))
    return {
        **{name: release[name] for name in _TEXT},
        "model_type": model_type,
        "vocab_size": shapes[_WORDS][0],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "pad_token_id": pad,
    }


def tower_of(shapes: Mapping[str, Shape], prefix: str, name: str | None) -> dict[str, int]:
    """Return the sizes of a vision tower, read off its tensors; a class token has a position of its own.

    Args:
        shapes: of all tensors.
        prefix: before the tower's names.
        name: of the tower in config.json. It alone tells an image size that patches do not divide.

    Raises:
        UserError: a tensor is missing, or the tower is not the one of that name.
    """
    patches = f"{prefix}embeddings.patch_embedding.weight"
    places = f"{prefix}embeddings.position_embedding.weight"
    widened = f"{prefix}encoder.layers.0.mlp.fc1.weight"
    require_tensors(shapes, [patches, places, widened])
    width, _, patch, _ = shapes[patches]
    grid = isqrt(shapes[places][0])
    image = grid * patch
    named = _TOWER_NAME.search(str(name))
    if named is not None:
        image = int(named[2] or 224)
        if (int(named[1]), image // patch) != (patch, grid):
            raise UserError(
                f"the vision tower has {grid} x {grid} patches of {patch} x {patch} pixels; valid: {name}"
            )
    layers = f"{prefix}encoder.layers."
    numbers = {key.removeprefix(layers).split(".")[0] for key in shapes if key.startswith(layers)}
    return {
        "hidden_size": width,
        "intermediate_size": shapes[widened][0],
        "num_hidden_layers": len(numbers),
        "image_size": image,
        "patch_size": patch,
    }


def require_tensors(shapes: Mapping[str, Shape], names: Sequence[str]) -> None:
    """Raise UserError for a tensor that a release must hold."""
    lacking = [name for name in names if name not in shapes]
    if lacking:
        raise UserError(f"this is not a release of LLaVA: there is no tensor {lacking[0]!r}")


IMAGE, PADDING = "<image>", "<pad>"


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer with a placeholder and a padding token, as in transformers' checkpoints.

    LLaVA's code encodes each text between pictures by itself, so every one begins with a space.

    Raises:
        UserError: a file is missing or of another kind, or ids would differ from the release's.
    """
    if (folder / "tokenizer.model").is_file():
        settings = read_settings(folder)
        backend, _ = from_pieces(folder, settings, once=False)
        tokenizer = wrapped(backend, **settings.named)
    else:
        with foreign(f"{str(folder)!r}: no usable tokenizer", "the original files"):
            # Not as a Llama's, for which the library would rebuild it.
            tokenizer = pretrained(PreTrainedTokenizerFast, folder)
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (IMAGE, PADDING)],
        special_tokens=True,
    )
    tokenizer.pad_token = PADDING
    return tokenizer


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

    def rename(name: str, tensor: Tensor) -> dict[str, Tensor]:
        # No name of a release begins as those of CLIP's checkpoints do, which also hold a text model.
        if not shards or name.startswith(("model.", HEAD)):
            if name.endswith(_COMPUTED):
                return {}
            table = lengthened(tensor, rows) if name in (_WORDS, HEAD) else tensor
            for pattern, new in RENAMES.items():
                name = re.sub(pattern, new, name)
            return {name: table}
        if not name.startswith(ALONE) or name.endswith(_COMPUTED):
            return {}
        return {"model.vision_tower." + name.removeprefix(ALONE): tensor}

    write_checkpoint(
        release,
        target,
        say,
        model_class=LlavaNextForConditionalGeneration if crops else LlavaForConditionalGeneration,
        config=config,
        processor=processor,
        generation=GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        rename=rename,
        shards=shards,
    )


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
    require_settings(release, SETTINGS, "converted")
    vision = tower_of(shapes, prefix, release.get("mm_vision_tower"))
    text = text_of(release, shapes, stack, tokenizer.pad_token_id)
    return (LlavaNextConfig if crops else LlavaConfig)(
        # As many rows as in transformers' own checkpoints, which the model files state: two placeholders more, rounded
        # up to a multiple of 64.
        text_config={**text, "vocab_size": -(-(text["vocab_size"] + 2) // 64) * 64},
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


def _frame(stack: str, tokenizer: Any) -> str:
    """Return the chat format, which LLaVA's code chooses by the name of the release."""
    if stack == "mistral":
        return "mistral_instruct"
    return "chatml_direct" if "<|im_start|>" in tokenizer.get_vocab() else "vicuna_v1"


#: Runs the command line.
main = command_line(
    "llava",
    __doc__,
    convert,
    "/models/llava-v1.6-vicuna-7b /models/llava_next_7b",
    "--tower /models/clip-vit-large-patch14-336 /models/llava-v1.5-7b /models/llava15_7b",
    tower="the CLIP checkpoint",
)
