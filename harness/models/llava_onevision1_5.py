"""LLaVA-OneVision-1.5 (An et al., 2025, arXiv 2509.23661), which transformers lacks: RICE-ViT, 2 x 2 patches, Qwen3.

Qwen3 counts all tokens on one axis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import Qwen2VLConfig, Qwen2VLProcessor

from espalier.harness.models.architectures.rice_vit import LlavaOnevision15ForConditionalGeneration
from espalier.harness.models.loader import load_part
from espalier.harness.models.qwen2_vl import Qwen2VLAdapter
from espalier.harness.specs.run_spec import ModelSpec


class LlavaOnevision15Adapter(Qwen2VLAdapter):
    """`LlavaOnevision15ForConditionalGeneration`: a class token in each picture, tokens counted on one axis."""

    data = replace(
        Qwen2VLAdapter.data,
        model_class=LlavaOnevision15ForConditionalGeneration,
        class_tokens=1,
        library_positions=True,
        renames={
            r"^visual\.": "model.visual.",
            r"^model\.(embed_tokens|layers|norm)\.": r"model.language_model.\1.",
        },
    )

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor; the tower takes frames one by one."""
        # With a configuration, the library does not look for the release's class of it, which is remote code.
        processor = load_part(spec, Qwen2VLProcessor, config=Qwen2VLConfig())
        processor.video_processor.temporal_patch_size = 1
        return cls.adopt_processor(processor, spec)
