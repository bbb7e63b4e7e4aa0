"""Decoder stacks of the papers' models, from conf/model, and the exact FLOPs of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from espalier.harness.config.group_lists import read_choice
from espalier.harness.cost.facts import StackFacts
from espalier.harness.cost.flops import quadratic


@cache
def text_stack(name: str) -> StackFacts:
    """Return `facts.text` of conf/model/<name>.yaml."""
    facts = read_choice("model", name)["facts"]
    return StackFacts(**{"gated": True, "causal": "diffusion" not in facts, **facts["text"]})


def exact(stack: StackFacts, tokens: Sequence[float]) -> float:
    """Return exact FLOPs of decoder layers with `tokens` each: all matrices, grouped heads, visible pairs, routers."""
    total = 0.0
    for layer, n in enumerate(tokens):
        linear, pairs = quadratic(stack, first=layer == 0)
        total += linear * n + pairs * n * n
    return total
