"""Qwen2.5-VL: as Qwen2-VL, with window attention in most layers of the tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)

from espalier.harness.models.qwen2_vl import Qwen2VLAdapter, window_order

if TYPE_CHECKING:
    from espalier.harness.cost.facts import ModelFacts


class Qwen25VLAdapter(Qwen2VLAdapter):
    """`Qwen2_5_VLForConditionalGeneration`: tower and projector process units window by window."""

    model_class = Qwen2_5_VLForConditionalGeneration
    config_class = Qwen2_5_VLConfig
    processor_class = Qwen2_5_VLProcessor

    @classmethod
    def tower_config(cls, facts: ModelFacts) -> dict[str, Any]:
        """Return the tower's sizes; blocks with full attention are evenly spaced and include the last."""
        tower = facts.tower
        spanning = tower.layers - tower.window_layers
        return {
            "depth": tower.layers,
            "hidden_size": tower.hidden,
            "intermediate_size": tower.intermediate,
            "num_heads": tower.heads,
            "out_hidden_size": facts.text.hidden,
            "fullatt_block_indexes": [
                (n + 1) * tower.layers // spanning - 1 for n in range(spanning)
            ],
        }

    @property
    def pace(self) -> float | None:
        """Position steps per second of a video, from the checkpoint's configuration."""
        return float(self.model.config.vision_config.tokens_per_second)

    def global_blocks(self) -> Sequence[int]:
        """Return the numbers of the blocks with full attention."""
        numbers: Sequence[int] = self.model.config.vision_config.fullatt_block_indexes
        return numbers

    def tower_windows(self) -> int:
        """Return the number of blocks with window attention."""
        return len(self.tower_layers()) - len(self.global_blocks())

    def order(self, shape: Sequence[int]) -> tuple[Tensor, int]:
        """Return the units window by window, and the pairs of patches attended in windows; see `window_order`."""
        config = self.model.config.vision_config
        side = config.window_size // config.spatial_merge_size // config.patch_size
        return window_order(shape, config.spatial_merge_size, side)
