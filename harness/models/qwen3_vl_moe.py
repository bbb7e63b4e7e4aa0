"""Qwen3-VL with experts."""

from __future__ import annotations

from dataclasses import replace

from transformers import Qwen3VLMoeForConditionalGeneration

from espalier.harness.models.qwen3_vl import Qwen3VLAdapter


class Qwen3VLMoeAdapter(Qwen3VLAdapter):
    """`Qwen3VLMoeForConditionalGeneration`: a router sends each token to a few experts of every decoder layer."""

    data = replace(
        Qwen3VLAdapter.data,
        model_class=Qwen3VLMoeForConditionalGeneration,
        loads_shared=False,  # there, transformers 5.23 leaves stored experts transposed
    )
