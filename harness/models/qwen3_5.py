"""Qwen3.5 (Qwen Team, 2026): as Qwen3-VL without DeepStack, and three of four decoder layers have linear attention.

A linear layer (gated delta net, transformers' `Qwen3_5GatedDeltaNet`) has one state of constant size. Dropped tokens
leave no trace in the states of later layers. To mask them would not be the same: their places still pass through the
convolution and fade the state, so that methods cannot be emulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from espalier.harness.models.qwen3_vl import Qwen3VLAdapter
from espalier.harness.models.random_weights import stated

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


class Qwen35Adapter(Qwen3VLAdapter):
    """`Qwen3_5ForConditionalGeneration`: full layers between layers of linear attention."""

    model_class: ClassVar[Any] = Qwen3_5ForConditionalGeneration
    config_class: ClassVar[Any] = Qwen3_5Config
    conversation: ClassVar[str] = "qwen3_5"

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration, with the linear layers of `facts.text.linear`."""
        return super().configuration(with_linear(spec), tokenizer)

    def deepstack(self) -> Mapping[int, nn.Module]:
        """Return nothing."""
        return {}


class Qwen35MoeAdapter(Qwen35Adapter):
    """`Qwen3_5MoeForConditionalGeneration`: a router sends each token to a few experts, and a gate to one for all."""

    model_class = Qwen3_5MoeForConditionalGeneration
    config_class = Qwen3_5MoeConfig


def with_linear(spec: ModelSpec) -> ModelSpec:
    """Return a spec with the linear layers of `facts.text.linear` in `architecture.text`."""
    linear = stated(spec, "text.linear", spec.facts.text.linear)
    text = {
        "head_dim": spec.facts.text.head_dim,
        "full_attention_interval": linear.interval,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        **spec.architecture.get("text", {}),
    }
    return replace(spec, architecture={**spec.architecture, "text": text})
