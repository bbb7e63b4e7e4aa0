"""Architecture facts of a model, known from its config file alone, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StackFacts:
    """One transformer stack: enough to count its arithmetic and its cache.

    `gated` says whether the MLP has three matrices (SwiGLU) or two; `causal` whether attention is.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    causal: bool


@dataclass(frozen=True)
class ModelFacts:
    """What validation, budgets and the FLOPs counter must know.

    Attributes:
        text: the decoder stack.
        tower: the vision tower (`layers` counts those that run).
        vocabulary: rows of the output head.
        visual_tokens: nominal visual tokens of one image; real counts come from the sample.
        tower_tokens: tokens the tower processes for one image, class token included.
        class_token: whether the tower has a class token.
        signals: names out of methods.base.SIGNALS that the adapter can produce.
    """

    text: StackFacts
    tower: StackFacts
    vocabulary: int
    visual_tokens: int
    tower_tokens: int
    class_token: bool
    signals: frozenset[str]

    @classmethod
    def from_config(cls, facts: Mapping[str, Any]) -> ModelFacts:
        """Build from the `facts` block of conf/model/<name>.yaml."""
        text = StackFacts(**facts["text"], gated=True, causal=True)
        tower = StackFacts(**facts["tower"], gated=False, causal=False)
        rest = {
            key: facts[key]
            for key in ("vocabulary", "visual_tokens", "tower_tokens", "class_token")
        }
        return cls(text=text, tower=tower, signals=frozenset(facts["signals"]), **rest)
