"""LLaDA-V: LLaVA-OneVision's vision side with SigLIP 2, in front of LLaDA, which denoises its answers.

LLaDA has Llama's architecture with bidirectional attention (`model.facts.diffusion`). LaViDa's and LLaDA-V's releases
are loaded under their tensor names, without their code: LaViDa's has LLaDA's names, LLaDA-V's has Llama's; no rows or
columns are permuted, since both rotate halves of a head. Both config.json belong to remote code, and neither describes
the tower, which is SigLIP so400m at 384 pixels without its last layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from transformers import LlavaOnevisionImageProcessorPil

from espalier.harness.models.adapter import FAST
from espalier.harness.models.architectures.llava_releases import (
    LLADA_FIXED,
    LLADA_RENAMES,
    LladaVForConditionalGeneration,
    LladaVProcessor,
    ReleasedAdapter,
)
from espalier.harness.models.conversations import FLUSH, JOINS
from espalier.harness.models.llava_onevision import LlavaOnevisionAdapter
from espalier.harness.models.random_weights import text_config
from espalier.harness.settings import OneOf
from espalier.harness.specs.run_spec import ModelSpec

#: LLaDA's special tokens: padding, begin, end, placeholders, marks of turns, and the mask token.
SPECIAL = (
    *("<|endoftext|>", "<|startoftext|>", "<|endoftext|>", "<image>", "<video>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>"),
)


#: What stands for each of several pictures: its padded view as in training, like a view of a single picture, then a
#: newline; or its patches alone, not pooled, which is what the releases' evaluations feed.
SEVERAL = ("training", "evaluation")


class LladaVAdapter(ReleasedAdapter):
    """`LladaVForConditionalGeneration`: AnyRes for one image, one padded view for each of several (`SEVERAL`)."""

    data = replace(
        LlavaOnevisionAdapter.data,
        model_class=LladaVForConditionalGeneration,
        types=("llava_llada",),
        # The release's config.json belongs to remote code and does not describe the tower.
        self_described=False,
        renames=LLADA_RENAMES,
        fixed=LLADA_FIXED,
        tokenizer=FAST,
        special=SPECIAL,
        # As in the release's evaluation, which requests short answers without reasoning.
        conversation="llada_no_think",
        joins={**JOINS, "flush": FLUSH},
        # As in the release's evaluation: one full stop at the end is dropped.
        clean=lambda text: text.removesuffix(".").strip(),
        settings={"several_pictures": ("", Annotated[str, OneOf(SEVERAL)] | None)},
        processor_class=LladaVProcessor,
        # As the releases resize.
        part_classes={"image_processor": LlavaOnevisionImageProcessorPil},
        text=text_config(model_type="llama"),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Set what stands for each of several pictures."""
        super().__init__(model, processor, spec)
        self._bare_views = spec.processor.get("several_pictures") == "evaluation"
        model.model.bare_views = self._bare_views
        processor.bare_tokens = self._side**2 if self._bare_views else None
