"""CLIP and SigLIP towers, with a projector that reads the output of one of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from espalier.harness.engine.model_parts import TowerBlock
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter


class ClipTowerAdapter(Adapter):
    """A family with a projector that reads hidden_states[vision_feature_layer] of a CLIP or SigLIP tower."""

    def tower_attention(self, index: int | None) -> Any:
        """Return the attention of an encoder layer; hidden_states[-2] is the output of the last layer but one."""
        return super().tower_attention(self.read_layers() - 1 if index is None else index)

    def unread_blocks(self) -> Sequence[nn.Module]:
        """Return the encoder's layers after the one of `vision_feature_layer`."""
        return list(self.tower_layers())[self.read_layers() :]

    def tower_blocks(self) -> Sequence[TowerBlock]:
        """Return the encoder's layers up to the one of `vision_feature_layer`."""
        return [TowerBlock(layer) for layer in list(self.tower_layers())[: self.read_layers()]]

    def read_layers(self) -> int:
        """Return the number of the encoder's layers that the projector reads: hidden_states[0] is the embeddings.

        Raises:
            UserError: the checkpoint's feature layer is not one of them.
        """
        feature, depth = self.model.config.vision_feature_layer, len(self.tower.encoder.layers)
        if (
            not isinstance(feature, int)
            or not 0 < feature % (depth + 1) <= depth
            or abs(feature) > depth
        ):
            raise UserError(
                f"model: the checkpoint's vision_feature_layer={feature!r} is not a layer of a tower of {depth}; "
                f"valid in its config.json: -1 to -{depth}"
            )
        return feature % (depth + 1)
