"""Tensors, tower and text stack of releases in LLaVA's format: LLaVA-1.5 and -1.6, LLaVA-OneVision, LLaVA-Video."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.tools.convert.shards import Lengthened, Parts, Shape, Unused

#: Names of the tower's tensors in a release that holds one, and in a checkpoint of CLIP.
INSIDE, ALONE = "model.vision_tower.vision_tower.vision_model.", "vision_model."

_WORDS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

#: The release's prefixes and the model's.
_PREFIXES = {
    INSIDE: "model.vision_tower.",
    "model.mm_projector.0.": "model.multi_modal_projector.linear_1.",
    "model.mm_projector.2.": "model.multi_modal_projector.linear_2.",
    "model.image_newline": "model.image_newline",
    "model.layers.": "model.language_model.layers.",
    "model.norm.": "model.language_model.norm.",
}

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


def rename_llava(name: str, rows: int) -> str | Parts | None:
    """Return the model's name of a tensor of the release, None for an unknown one.

    Args:
        name: the release's name.
        rows: tokens of the model's embedding and output head.
    """
    if name.endswith(_COMPUTED):
        return Unused()
    if name == _WORDS:
        return Lengthened("model.language_model.embed_tokens.weight", rows)
    if name == _HEAD:
        return Lengthened(_HEAD, rows)
    for old, new in _PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None


def rename_tower(name: str) -> str | Parts:
    """Return the model's name of a tensor of a CLIP checkpoint, which also holds a text model."""
    if not name.startswith(ALONE) or name.endswith(_COMPUTED):
        return Unused()
    return "model.vision_tower." + name.removeprefix(ALONE)


def text_of(
    release: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    kind: str,
    model_type: str,
    pad: int | None,
) -> dict[str, Any]:
    """Return the configuration of the text stack; its vocabulary is that of the embedding.

    Args:
        release: the release's config.json.
        shapes: of its tensors.
        kind: what an error line calls the release.
        model_type: the text stack's in the library.
        pad: id of the padding token.

    Raises:
        UserError: config.json lacks a key, or the release the embedding.
    """
    lacking = [name for name in _TEXT if name not in release]
    if lacking:
        raise UserError(f"this is not a release of {kind}: config.json has no {lacking[0]!r}")
    require_tensors(shapes, [_WORDS], kind)
    # Absent in the oldest releases, which have the library's default.
    theta = float(release.get("rope_theta", 10000.0))
    return {
        **{name: release[name] for name in _TEXT},
        "model_type": model_type,
        "vocab_size": shapes[_WORDS][0],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "pad_token_id": pad,
    }


def tower_of(
    shapes: Mapping[str, Shape], prefix: str, kind: str, name: str | None
) -> dict[str, int]:
    """Return the sizes of a vision tower, read off its tensors; a class token has a position of its own.

    Args:
        shapes: of all tensors.
        prefix: before the tower's names.
        kind: what an error line calls the release.
        name: of the tower in config.json. It alone tells an image size that patches do not divide, as SigLIP's 384.

    Raises:
        UserError: a tensor is missing, or the tower is not the one of that name.
    """
    patches = f"{prefix}embeddings.patch_embedding.weight"
    places = f"{prefix}embeddings.position_embedding.weight"
    widened = f"{prefix}encoder.layers.0.mlp.fc1.weight"
    require_tensors(shapes, [patches, places, widened], kind)
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


def require_tensors(shapes: Mapping[str, Shape], names: Sequence[str], kind: str) -> None:
    """Raise UserError for a tensor that a release of `kind` must hold."""
    lacking = [name for name in names if name not in shapes]
    if lacking:
        raise UserError(f"this is not a release of {kind}: there is no tensor {lacking[0]!r}")


def padded_rows(rows: int) -> int:
    """Return the rows of transformers' checkpoints: two placeholders more, rounded up to a multiple of 64."""
    return -(-(rows + 2) // 64) * 64
