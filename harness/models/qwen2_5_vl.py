"""Qwen2.5-VL: as Qwen2-VL, with window attention in most layers of the tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from espalier.harness.models.qwen2_vl import (
    TOWER,
    Qwen2VLAdapter,
    patch_processor,
    qwen_config,
    window_order,
)

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


def full_blocks(spec: ModelSpec, _: Any) -> list[int]:
    """Return the numbers of the blocks with full attention: they are evenly spaced and include the last."""
    tower = spec.facts.tower
    spanning = tower.layers - tower.window_layers
    return [(n + 1) * tower.layers // spanning - 1 for n in range(spanning)]


class Qwen25VLAdapter(Qwen2VLAdapter):
    """`Qwen2_5_VLForConditionalGeneration`: tower and projector process units window by window."""

    data = replace(
        Qwen2VLAdapter.data,
        model_class=Qwen2_5_VLForConditionalGeneration,
        config=qwen_config(Qwen2_5_VLConfig, **TOWER, fullatt_block_indexes=full_blocks),
        processor=patch_processor(
            Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
        ),
    )

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
