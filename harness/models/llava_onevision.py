"""LLaVA-OneVision: SigLIP and Qwen2, AnyRes images of up to 9 crops, several images or a video at lower resolution."""

from __future__ import annotations

from functools import partial

from transformers import (
    AutoTokenizer,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    Qwen2Config,
)

from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.llava_releases import (
    QWEN2_FIXED,
    RENAMES,
    ReleasedAdapter,
)
from espalier.harness.models.chat_media import MARK
from espalier.harness.models.conversations import JOINS
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import text_config, vision_config


class LlavaOnevisionAdapter(ReleasedAdapter):
    """`LlavaOnevisionForConditionalGeneration`."""

    data = FamilyData(
        model_class=LlavaOnevisionForConditionalGeneration,
        types=("llava_onevision", "llava_qwen"),  # of the library's format and of the release
        renames=RENAMES,
        # The release's own configuration class is not part of transformers.
        tokenizer=partial(load_part, part_class=AutoTokenizer, config=Qwen2Config()),
        fixed={
            **QWEN2_FIXED,
            "mm_newline_position": "one_token",
            "mm_spatial_pool_mode": "bilinear",
        },
        conversation="qwen_1_5",
        joins=JOINS,
        takes_video=True,
        pieces="alone",
        placeholders=(MARK, "<video>"),
        lacking=("luma",),  # tokens of large images and of video frames blend several patches
        patch_tokens=True,
        processor_class=LlavaOnevisionProcessor,
        part_classes={"image_processor": LlavaOnevisionImageProcessor},
        vision=vision_config(model_type="siglip_vision_model"),
        text=text_config(model_type="qwen2"),
        token_ids={"image_token_index": "<image>", "video_token_index": "<video>"},
    )
