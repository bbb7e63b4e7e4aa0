"""Convert a release of LLaVA-Video (lmms-lab's format) to a checkpoint that the project loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.models.llava_video_model import (
    LlavaVideoConfig,
    LlavaVideoForConditionalGeneration,
)
from espalier.harness.specs.command_help import command_parser
from espalier.harness.tools.convert.shards import Shape, check_names, rewrite, shapes_of, shards_of

_TOWER = "model.vision_tower.vision_tower.vision_model."
_PATCHES = f"{_TOWER}embeddings.patch_embedding.weight"
_PLACES = f"{_TOWER}embeddings.position_embedding.weight"
_WIDENED = f"{_TOWER}encoder.layers.0.mlp.fc1.weight"
_WORDS = "model.embed_tokens.weight"

#: The release's prefixes and the model's.
_PREFIXES = {
    _TOWER: "model.vision_tower.",
    "model.mm_projector.0.": "model.multi_modal_projector.linear_1.",
    "model.mm_projector.2.": "model.multi_modal_projector.linear_2.",
    "model.image_newline": "model.image_newline",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.layers.": "model.language_model.layers.",
    "model.norm.": "model.language_model.norm.",
    "lm_head.": "lm_head.",
}

#: Keys of the text stack with the same names in the release's config.json.
_TEXT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "hidden_act"),
)

#: SigLIP so400m has 16 heads; no tensor shows it.
_TOWER_HEADS = 16


def rename(name: str) -> str | None:
    """Return the model's name of a tensor of the release, None for an unknown one."""
    for old, new in _PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None


def configuration(
    release: Mapping[str, Any], shapes: Mapping[str, Shape], tokenizer: Any
) -> LlavaVideoConfig:
    """Return the model's configuration.

    Args:
        release: the release's config.json.
        shapes: of its tensors; the tower's sizes are read off them.
        tokenizer: with the two placeholders.

    Raises:
        UserError: it is not a release of LLaVA-Video with newlines after rows and pooling by two.
    """
    for key, valid in (("mm_newline_position", "grid"), ("mm_spatial_pool_stride", 2)):
        if release.get(key, valid) != valid:
            raise UserError(
                f"config.json: {key}={release[key]!r} cannot be converted; valid: {valid}"
            )
    pinpoints = release.get("image_grid_pinpoints", [])
    if not isinstance(pinpoints, list):
        raise UserError(
            f"config.json: image_grid_pinpoints={pinpoints!r} cannot be converted; valid: a list of sizes in pixels"
        )
    lacking = [
        name for name in (*_TEXT, "image_grid_pinpoints", "rope_theta") if name not in release
    ]
    if lacking:
        raise UserError(f"this is not a release of LLaVA-Video: config.json has no {lacking[0]!r}")
    lacking = [name for name in (_PATCHES, _PLACES, _WIDENED, _WORDS) if name not in shapes]
    if lacking:
        raise UserError(f"this is not a release of LLaVA-Video: there is no tensor {lacking[0]!r}")
    width, _, patch, _ = shapes[_PATCHES]
    layers = {name.split(".")[6] for name in shapes if name.startswith(f"{_TOWER}encoder.layers.")}
    text = {name: release[name] for name in _TEXT}
    rope = {"rope_type": "default", "rope_theta": float(release["rope_theta"])}
    return LlavaVideoConfig(
        text_config={
            **text,
            "model_type": "qwen2",
            "vocab_size": shapes[_WORDS][0],
            "rope_parameters": rope,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": width,
            "intermediate_size": shapes[_WIDENED][0],
            "num_hidden_layers": len(layers),
            "num_attention_heads": _TOWER_HEADS,
            "image_size": isqrt(shapes[_PLACES][0]) * patch,
            "patch_size": patch,
            "vision_use_head": False,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=release["image_grid_pinpoints"],
        vision_aspect_ratio=release.get("image_aspect_ratio", "anyres_max_9"),
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def convert(source: Path, target: Path, say: Callable[[str], None]) -> None:
    """Write a checkpoint that model=llava_video_7b loads with model.path=<target>.

    Args:
        source: directory of the release: config.json, tokenizer, safetensors shards.
        target: directory to write, new or empty.
        say: called with progress lines.

    Raises:
        UserError: the release is incomplete, holds unknown tensors, or `target` is in use.
    """
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{str(target)!r} is not empty; give a new directory")
    shards = shards_of(source)
    shapes = shapes_of(shards)
    try:
        release = json.loads((source / "config.json").read_text(encoding="utf-8"))
        # The release's own configuration class is not part of transformers.
        tokenizer = AutoTokenizer.from_pretrained(source, config=Qwen2Config())
    except FOREIGN as error:
        raise UserError(
            f"{str(source)!r}: no usable config.json and tokenizer ({error})"
        ) from error
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<image>", "<video>")],
        special_tokens=True,
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    config = configuration(release, shapes, tokenizer)
    rows = shapes[_WORDS][0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the release's embedding {rows} rows"
        )
    with torch.device("meta"):
        model = LlavaVideoForConditionalGeneration(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    check_names(shapes, rename, expected, tied)
    target.mkdir(parents=True, exist_ok=True)
    rewrite(shards, rename, target, say)
    config.architectures = [type(model).__name__]
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # Greedy; the end of a turn and the end of a text both end an answer.
    ends = sorted(
        {tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")} - {None}
    )
    GenerationConfig(
        bos_token_id=release["bos_token_id"],
        eos_token_id=ends or release["eos_token_id"],
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(target)
    say(f"done: {len(shapes)} tensors in {target}; use it with model.path={target}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command_parser(
        "convert llava_video", __doc__, "/models/LLaVA-Video-7B-Qwen2 /models/llava_video"
    )
    parser.add_argument("source", type=Path, metavar="release")
    parser.add_argument("target", type=Path, metavar="output")
    options = parser.parse_args(arguments)
    try:
        convert(options.source, options.target, print)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
