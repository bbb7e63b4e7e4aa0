"""Qwen3-VL: as Qwen2-VL, with features of earlier tower layers added in the decoder, and times between frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from espalier.harness.models.conversations import TIMED
from espalier.harness.models.llava_onevision import HALF
from espalier.harness.models.qwen2_vl import (
    TOWER,
    Qwen2VLAdapter,
    patch_processor,
    qwen_config,
)
from espalier.harness.models.random_weights import Value

#: Sizes of the tower, and the layers with features for the decoder.
DEEP_TOWER: Mapping[str, Value] = {
    **TOWER,
    "deepstack_visual_indexes": lambda spec, _: list(spec.facts.deepstack),
}


class Qwen3VLAdapter(Qwen2VLAdapter):
    """`Qwen3VLForConditionalGeneration`: each pair of a video's frames follows its time in the prompt."""

    data = replace(
        Qwen2VLAdapter.data,
        model_class=Qwen3VLForConditionalGeneration,
        conversation="qwen3",
        media=TIMED,
        config=qwen_config(Qwen3VLConfig, **DEEP_TOWER),
        processor=patch_processor(
            Qwen3VLProcessor,
            Qwen2VLImageProcessor,
            Qwen3VLVideoProcessor,
            image_mean=HALF,
            image_std=HALF,
        ),
    )
    library_positions = True  # each pair of frames has positions of its own, after its time as text

    def deepstack(self) -> Mapping[int, nn.Module]:
        """Return the mergers of the tower layers with features that the decoder adds to visual tokens."""
        tower: Any = self.tower
        return dict(zip(tower.deepstack_visual_indexes, tower.deepstack_merger_list, strict=True))


class Qwen3VLMoeAdapter(Qwen3VLAdapter):
    """`Qwen3VLMoeForConditionalGeneration`: a router sends each token to a few experts of every decoder layer."""

    data = replace(
        Qwen3VLAdapter.data,
        model_class=Qwen3VLMoeForConditionalGeneration,
        config=qwen_config(Qwen3VLMoeConfig, **DEEP_TOWER),
        loads_shared=False,  # there, transformers 5.23 leaves stored experts transposed
    )
