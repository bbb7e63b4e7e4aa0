"""Qwen3.5 with experts."""

from __future__ import annotations

from dataclasses import replace

from transformers import Qwen3_5MoeForConditionalGeneration

from espalier.harness.models.qwen3_5 import Qwen35Adapter


class Qwen35MoeAdapter(Qwen35Adapter):
    """`Qwen3_5MoeForConditionalGeneration`: a router sends each token to a few experts, and a gate to one for all."""

    data = replace(Qwen35Adapter.data, model_class=Qwen3_5MoeForConditionalGeneration)
