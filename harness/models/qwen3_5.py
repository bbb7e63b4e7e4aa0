"""Qwen3.5 (Qwen Team, 2026): Qwen3-VL without features of earlier tower layers, and with linear attention.

Three of four decoder layers have it (gated delta net, transformers' `Qwen3_5GatedDeltaNet`), with one state of constant
size. Dropped tokens leave no trace in the states of later layers. To mask them would not be the same: their places
still pass through the convolution and fade the state, so that methods cannot be emulated.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

from espalier.harness.models.qwen3_vl import Qwen3VLAdapter
from espalier.harness.models.random_weights import LINEAR, text_config


class Qwen35Adapter(Qwen3VLAdapter):
    """`Qwen3_5ForConditionalGeneration`: full layers between layers of linear attention."""

    data = replace(
        Qwen3VLAdapter.data,
        model_class=Qwen3_5ForConditionalGeneration,
        conversation="qwen3_5",
        text=text_config(**LINEAR),
    )


class Qwen35MoeAdapter(Qwen35Adapter):
    """`Qwen3_5MoeForConditionalGeneration`: a router sends each token to a few experts, and a gate to one for all."""

    data = replace(Qwen35Adapter.data, model_class=Qwen3_5MoeForConditionalGeneration)
