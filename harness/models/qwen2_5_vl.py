"""Qwen2.5-VL: Qwen2-VL with window attention in most layers of the tower, and positions by the seconds of a video."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from espalier.harness.models.architectures.patch_lists import TOWER, patch_processor
from espalier.harness.models.qwen2_vl import Qwen2VLAdapter
from espalier.harness.models.random_weights import Built
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
        vision=Built(
            dict, {**TOWER, "fullatt_block_indexes": full_blocks}, ("architecture.vision",)
        ),
        processor=patch_processor(
            Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
        ),
    )
