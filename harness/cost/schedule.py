"""Equivalent tokens of a schedule of visual tokens, under the rules by which a budget is counted.

A schedule is the tokens kept after each site of a method that shortens the prompt; `Site.shortens` gives the decoder
layer before which it does so. Each rule reduces it to *equivalent tokens*:

| rule       | equivalent tokens of a schedule                                                    |
| ---------- | ---------------------------------------------------------------------------------- |
| `kept`     | tokens kept after the last site                                                    |
| `average`  | mean over decoder layers of the visual tokens that enter them                      |
| `flops`    | tokens that, dropped to before layer 0, cost the same exact language-model prefill |
| `kv_bytes` | tokens that, in the cache of every layer, have the same bytes                      |

`flops` counts text tokens, grouped heads, causal attention, and linear attention in whole chunks
(harness/cost/flops.py). What enters a layer is what its cache holds after the prefill, so that of a method that drops
tokens `kv_bytes` is `average`; compressors, which evict entries of a whole prefill, have it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.flops import linear_cost, quadratic
from espalier.methods.base import MethodError, Site, TokenReducer
from espalier.methods.views import BEFORE_DECODER

RULES = ("kept", "average", "flops", "kv_bytes")


@dataclass(frozen=True)
class EquivalentTokens:
    """Equivalent visual tokens of a schedule under every rule."""

    kept: float
    average: float
    flops: float

    @property
    def kv_bytes(self) -> float:
        """Of methods that drop tokens, those that enter a layer."""
        return self.average


def equivalent_tokens(
    reducer: TokenReducer, facts: ModelFacts, n_visual: int, n_text: int, kept: Sequence[int]
) -> EquivalentTokens:
    """Return the equivalent tokens of the counts `kept` after each site, under every rule."""
    frame = frame_of(reducer, facts, n_visual, n_text)
    names = (field.name for field in fields(EquivalentTokens))
    return EquivalentTokens(**{rule: frame.equivalent(rule, kept) for rule in names})


@dataclass(frozen=True)
class Frame:
    """The plain numbers of one sample: layers of the sites, token counts, costs of a layer.

    One layer of n tokens costs `linear n + square n^2`, with (linear, square) in `cost`; layer 0 costs `extra n` more.
    Layers `states`, of linear attention, cost `state_cost n`.
    """

    starts: tuple[int, ...]
    depth: int
    visual: int
    text: int
    cost: tuple[float, float]
    extra: float = 0.0
    states: tuple[int, ...] = ()
    state_cost: float = 0.0

    @property
    def spans(self) -> tuple[int, ...]:
        """Decoder layers before the first site, then those after each site up to the next."""
        return tuple(b - a for a, b in pairwise((0, *self.starts, self.depth)))

    @property
    def _state_spans(self) -> tuple[int, ...]:
        """Of `spans`, the layers of linear attention."""
        bounds = pairwise((0, *self.starts, self.depth))
        return tuple(sum(a <= layer < b for layer in self.states) for a, b in bounds)

    def entering(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Return the visual tokens entering each layer."""
        counts = zip((self.visual, *kept), self.spans, strict=True)
        return tuple(count for count, span in counts for _ in range(span))

    def equivalent(self, rule: str, kept: Sequence[float]) -> float:
        """Return the equivalent tokens of a schedule, which may be fractional."""
        counts = (self.visual, *kept)
        if rule == "kept":
            return float(counts[-1])
        if rule in ("average", "kv_bytes"):
            return sum(c * s for c, s in zip(counts, self.spans, strict=True)) / self.depth
        linear, square = self.cost
        spent = sum(
            (span - states) * (linear * (count + self.text) + square * (count + self.text) ** 2)
            + states * self.state_cost * (count + self.text)
            for count, span, states in zip(counts, self.spans, self._state_spans, strict=True)
        )
        first = next(count for count, span in zip(counts, self.spans, strict=True) if span)
        spent += self.extra * (first + self.text)
        # Solve square n^2 + linear n = spent / depth for n > 0, with costs of the mean layer.
        linear += (self.extra + len(self.states) * (self.state_cost - linear)) / self.depth
        square *= 1 - len(self.states) / self.depth
        half = linear / (2 * square)
        return math.sqrt(half**2 + spent / (self.depth * square)) - half - self.text


def shortened_layer(site: Site) -> int:
    """Return the decoder layer with the input that a site shortens: 0 for all sites before the decoder.

    Raises:
        MethodError: it shortens no input: a cache gets shorter after its layer, a decoding step hides entries.
    """
    if site.shortens is None:
        raise MethodError(
            f"a {site.where} site shortens no input of a layer; valid for what drops tokens: "
            f"{', '.join(BEFORE_DECODER)}, layer"
        )
    return site.shortens


def frame_of(reducer: TokenReducer, facts: ModelFacts, n_visual: int, n_text: int) -> Frame:
    """Return the frame of one sample under one method and model."""
    depth = facts.text.layers
    starts = tuple(map(shortened_layer, reducer.all_sites(facts.tower.layers, depth)))
    linear, square = quadratic(facts.text)
    extra = quadratic(facts.text, first=True)[0] - linear
    states = tuple(filter(facts.text.is_linear, range(depth)))
    cost = linear_cost(facts.text)
    return Frame(starts, depth, n_visual, n_text, (linear, square), extra, states, cost)
