"""Layers and attention of CLIP and SigLIP towers, relative to the layer that the projector reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from espalier.harness.engine.model_parts import TowerBlock
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter


class ClipTowerAdapter(Adapter):
    """A family with a projector that reads hidden_states[vision_feature_layer] of a CLIP or SigLIP tower."""

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of an encoder layer; hidden_states[-2] is the output of the last layer but one."""
        return clip_attention(self.tower, self.model.config.vision_feature_layer, index)

    def unread_blocks(self) -> Sequence[nn.Module]:
        """Return the encoder's layers after the one of `vision_feature_layer`."""
        return list(self.tower_layers())[self._read_layers() :]

    def tower_blocks(self) -> Sequence[TowerBlock]:
        """Return the encoder's layers up to the one of `vision_feature_layer`."""
        return [TowerBlock(layer) for layer in list(self.tower_layers())[: self._read_layers()]]

    def _read_layers(self) -> int:
        return _feature_layer(self.tower, self.model.config.vision_feature_layer) + 1


def clip_attention(tower: Any, feature: int, index: int | None) -> nn.Module:
    """Return the attention of layer `index`; None: of the layer with output hidden_states[feature]."""
    layer = _feature_layer(tower, feature) if index is None else index
    attention: nn.Module = tower.encoder.layers[layer].self_attn
    return attention


def _feature_layer(tower: Any, feature: int) -> int:
    """Return the layer with output hidden_states[feature]: entry 0 is the embeddings, so entry f is layer f - 1."""
    depth = len(tower.encoder.layers)
    if (
        not isinstance(feature, int)
        or not 0 < feature % (depth + 1) <= depth
        or abs(feature) > depth
    ):
        raise UserError(
            f"model: the checkpoint's vision_feature_layer={feature!r} is not a layer of a tower of {depth}; "
            f"valid in its config.json: -1 to -{depth}"
        )
    return feature - 1 if feature >= 0 else depth + feature
