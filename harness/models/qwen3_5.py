"""Qwen3.5 (Qwen Team, 2026): as Qwen3-VL without DeepStack, and three of four decoder layers have linear attention.

A linear layer (gated delta net, transformers' `Qwen3_5GatedDeltaNet`) has one state of constant size. Dropped tokens
leave no trace in the states of later layers. To mask them would not be the same: their places still pass through the
convolution and fade the state, so that methods cannot be emulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from espalier.harness.models.qwen2_vl import qwen_config
from espalier.harness.models.qwen3_vl import DEEP_TOWER, Qwen3VLAdapter
from espalier.harness.models.random_weights import Value, of

#: The linear layers, by the keys of the text stack's configuration.
LINEAR: Mapping[str, Value] = {
    "head_dim": of("facts.text.head_dim"),
    "full_attention_interval": of("facts.text.linear.interval"),
    "linear_num_key_heads": of("facts.text.linear.key_heads"),
    "linear_num_value_heads": of("facts.text.linear.value_heads"),
    "linear_key_head_dim": of("facts.text.linear.key_dim"),
    "linear_value_head_dim": of("facts.text.linear.value_dim"),
}


class Qwen35Adapter(Qwen3VLAdapter):
    """`Qwen3_5ForConditionalGeneration`: full layers between layers of linear attention."""

    data = replace(
        Qwen3VLAdapter.data,
        model_class=Qwen3_5ForConditionalGeneration,
        conversation="qwen3_5",
        config=qwen_config(Qwen3_5Config, LINEAR, **DEEP_TOWER),
    )

    def deepstack(self) -> Mapping[int, nn.Module]:
        """Return nothing."""
        return {}


class Qwen35MoeAdapter(Qwen35Adapter):
    """`Qwen3_5MoeForConditionalGeneration`: a router sends each token to a few experts, and a gate to one for all."""

    data = replace(
        Qwen35Adapter.data,
        model_class=Qwen3_5MoeForConditionalGeneration,
        config=qwen_config(Qwen3_5MoeConfig, LINEAR, **DEEP_TOWER),
    )
