"""LLaVA-OneVision: SigLIP and Qwen2, AnyRes images of up to 9 crops, several images or a video at lower resolution."""

from __future__ import annotations

from transformers import (
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
)

from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.anyres_views import OnevisionViewsAdapter
from espalier.harness.models.chat_media import MARK
from espalier.harness.models.conversations import JOINS
from espalier.harness.models.random_weights import text_config, vision_config


class LlavaOnevisionAdapter(OnevisionViewsAdapter):
    """`LlavaOnevisionForConditionalGeneration`."""

    data = FamilyData(
        model_class=LlavaOnevisionForConditionalGeneration,
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
