"""LaViDa with Dream: Qwen2's blocks with bidirectional attention, under Qwen2's tensor names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import Qwen2Tokenizer

from espalier.harness.models.built_parts import text_config
from espalier.harness.models.conversations import JOINS
from espalier.harness.models.lavida import LavidaAdapter
from espalier.harness.models.loader import load_part

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
