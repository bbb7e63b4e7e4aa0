"""Qwen2-VL: images of any size, videos, 2 x 2 patches merged inside the tower."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import (
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.patch_lists import (
    BOUNDS,
    CAP,
    MergedPatchesAdapter,
    patch_processor,
)
from espalier.harness.models.conversations import BARE
from espalier.harness.models.random_weights import Built, Value, of

#: Sizes of the tower.
TOWER: Mapping[str, Value] = {
    "depth": of("facts.tower.layers"),
    "embed_dim": of("facts.tower.hidden"),
    "num_heads": of("facts.tower.heads"),
    "mlp_ratio": lambda spec, _: spec.facts.tower.intermediate // spec.facts.tower.hidden,
    "hidden_size": of("facts.text.hidden"),
}


class Qwen2VLAdapter(MergedPatchesAdapter):
    """`Qwen2VLForConditionalGeneration`: a projector unit is a square of patches, in raster order."""

    data = FamilyData(
        model_class=Qwen2VLForConditionalGeneration,
        conversation="qwen_1_5",
        takes_video=True,
        media=BARE,
        placeholders=("<|image_pad|>", "<|video_pad|>"),
        inline=None,
        lacking=("luma",),  # the tower gets a list of patches, from pictures of any size
        settings={**BOUNDS, **CAP},
        tower="model.visual",
        projector="model.visual.merger",
        vision=Built(dict, TOWER, ("architecture.vision",)),
        token_ids={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        processor=patch_processor(Qwen2VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor),
    )
