"""Qwen3-VL: the decoder adds features of earlier tower layers, and times stand between the frames of a video."""

from __future__ import annotations

from dataclasses import replace

from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from espalier.harness.models.architectures.patch_lists import TOWER, patch_processor
from espalier.harness.models.conversations import TIMED
from espalier.harness.models.qwen2_vl import Qwen2VLAdapter
from espalier.harness.models.random_weights import HALF, Built

#: Sizes of the tower, and the layers with features for the decoder.
DEEP_TOWER = Built(
    dict,
    {**TOWER, "deepstack_visual_indexes": lambda spec, _: list(spec.facts.deepstack)},
    ("architecture.vision",),
)


class Qwen3VLAdapter(Qwen2VLAdapter):
    """`Qwen3VLForConditionalGeneration`: each pair of a video's frames follows its time in the prompt."""

    data = replace(
        Qwen2VLAdapter.data,
        model_class=Qwen3VLForConditionalGeneration,
        conversation="qwen3",
        media=TIMED,
        library_positions=True,  # each pair of frames has positions of its own, after its time as text
        vision=DEEP_TOWER,
        processor=patch_processor(
            Qwen3VLProcessor,
            Qwen2VLImageProcessor,
            Qwen3VLVideoProcessor,
            image_mean=HALF,
            image_std=HALF,
        ),
    )


class Qwen3VLMoeAdapter(Qwen3VLAdapter):
    """`Qwen3VLMoeForConditionalGeneration`: a router sends each token to a few experts of every decoder layer."""

    data = replace(
        Qwen3VLAdapter.data,
        model_class=Qwen3VLMoeForConditionalGeneration,
        loads_shared=False,  # there, transformers 5.23 leaves stored experts transposed
    )
