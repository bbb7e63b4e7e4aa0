"""Layers and attention of CLIP and SigLIP towers, relative to the layer that the projector reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from espalier.harness.engine.tower_blocks import TowerBlock
from espalier.harness.errors import UserError


def clip_blocks(tower: Any, feature: int) -> Sequence[TowerBlock]:
    """Return the blocks up to the one with output hidden_states[feature], split in halves for methods between them."""
    return [
        TowerBlock(layer) for layer in tower.encoder.layers[: _feature_layer(tower, feature) + 1]
    ]


def clip_unread(tower: Any, feature: int) -> Sequence[nn.Module]:
    """Return the layers after the one with output hidden_states[feature]."""
    return list(tower.encoder.layers[_feature_layer(tower, feature) + 1 :])


def clip_attention(tower: Any, feature: int, index: int | None) -> nn.Module:
    """Return the attention of layer `index`; None: of the layer with output hidden_states[feature]."""
    layer = _feature_layer(tower, feature) if index is None else index
    attention: nn.Module = tower.encoder.layers[layer].self_attn
    return attention


def clip_patches(tower: Any) -> nn.Conv2d:
    """Return the convolution that cuts pictures into patches."""
    convolution: nn.Conv2d = tower.embeddings.patch_embedding
    return convolution


def _feature_layer(tower: Any, feature: int) -> int:
    """Return the layer with output hidden_states[feature]: entry 0 is the embeddings, so entry f is layer f - 1."""
    depth = len(tower.encoder.layers)
    if (
        not isinstance(feature, int)
        or not 0 < feature % (depth + 1) <= depth
        or abs(feature) > depth
    ):
        raise UserError(
            f"the checkpoint's vision_feature_layer={feature!r} is not a layer of a tower of {depth}; "
            f"valid: -1 to -{depth}"
        )
    return feature - 1 if feature >= 0 else depth + feature
