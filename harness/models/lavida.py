"""LaViDa: LLaDA-V's modules with SigLIP, up to four tiles per image, each view pooled to a quarter of its patches.

transformers lacks this architecture: LLaVA-OneVision with views pooled before stitching. The text stack is LLaDA's, or
Dream's: Qwen2's blocks with bidirectional attention, under Qwen2's tensor names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from transformers import Qwen2Tokenizer

from espalier.harness.models.architectures.llava_releases import (
    LavidaForConditionalGeneration,
    LavidaProcessor,
)
from espalier.harness.models.conversations import JOINS
from espalier.harness.models.llada_v import LladaVAdapter
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import text_config
from espalier.harness.specs.run_spec import ModelSpec


class LavidaAdapter(LladaVAdapter):
    """`LavidaForConditionalGeneration`: pooled views, stitched, unpadded, a newline token after each row."""

    data = replace(
        LladaVAdapter.data,
        model_class=LavidaForConditionalGeneration,
        processor_class=LavidaProcessor,
        conversation="llada",
        patch_tokens=False,  # a token is the mean of several patches
        # As in the release's evaluation: leading exclamation marks are dropped.
        clean=lambda text: text.lstrip("!").strip(),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Measure the number of tokens of a pooled view."""
        super().__init__(model, processor, spec)
        self._view = self._pooling.side

    @classmethod
    def built_processor(cls, config: Any, tokenizer: Any) -> Any:
        """Return the processor of a configuration, which counts pooled tokens."""
        processor = super().built_processor(config, tokenizer)
        side = config.vision_config.image_size // config.vision_config.patch_size
        processor.num_image_tokens = ceil(side / 2) ** 2
        return processor


#: Dream's special tokens: padding, begin, end, placeholders, marks of turns, and the mask token.
DREAM_SPECIAL = (
    *("<|endoftext|>", "<|beginoftext|>", "<|endoftext|>", "<image>", "<video>"),
    *("<|im_start|>", "<|im_end|>", "<|mask|>"),
)


class LavidaDreamAdapter(LavidaAdapter):
    """`LavidaForConditionalGeneration` around Qwen2's modules; Dream's code adds two tokens to Qwen2's tokenizer."""

    data = replace(
        LavidaAdapter.data,
        types=("llava_dream",),
        tokenizer=partial(load_part, part_class=Qwen2Tokenizer),
        special=DREAM_SPECIAL,
        conversation="dream",
        joins=JOINS,
        text=text_config(model_type="qwen2"),
    )
