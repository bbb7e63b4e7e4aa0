"""The base of methods that compress the KV cache: a score for each entry, a budget for each layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.base import Method, Need, Site
from espalier.methods.checks import require, require_choices
from espalier.methods.select.budgets import RULES, entries
from espalier.methods.select.topk import top

Scope = Literal["visual", "prompt"]
Allocation = Literal[
    "uniform", "pyramid", "lorenz", "strength", "skewness", "strength_and_skewness"
]


@dataclass(frozen=True)
class CacheView:
    """What a cache compressor may read of one layer and one sample after prefill; padding is left out.

    Every tensor is on the layer's device.

    Attributes:
        layer: decoder layer.
        queries: (H, L, D) queries of the prompt, rotary positions applied.
        keys: (H_kv, L, D) keys, one copy for each KV head; query head h reads key head h // (H / H_kv).
        scaling: factor of the products of queries and keys.
        candidates: (N,) ascending slots that may be evicted.
        visual: (V,) ascending slots of visual tokens.
        words: (T,) ascending slots of the words after the last visual token, the last prompt token included.
        chance: the sample's generator, for a method that `draws`; `generator` reads it.
        between: ascending slots of the words after the first visual token that are not in `words`; None: there are
            none.
        pictures: (V,) number of the image or video of each visual token, ascending; None: there is one.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    scaling: float
    candidates: Tensor
    visual: Tensor
    words: Tensor
    chance: Sequence[torch.Generator] = ()
    between: Tensor | None = None
    pictures: Tensor | None = None

    @property
    def generator(self) -> torch.Generator:
        """Random numbers of this sample.

        Raises:
            MethodError: the compressor does not declare that it draws.
        """
        return self.chance[0]

    @property
    def last_picture(self) -> Tensor:
        """Ascending slots of the visual tokens of the last image or video."""
        if self.pictures is None:
            return self.visual
        return self.visual[self.pictures == self.pictures[-1]]

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        return len(self.queries), len(self.keys)


@dataclass(frozen=True)
class CacheCompressor(Method):
    """Evicts entries of the KV cache once, after prefill, each layer by its own budget.

    Attributes:
        allocation: how the budget is split over layers.
        scope: what may be evicted: visual entries alone, or all of the prompt except `exempt`.
    """

    allocation: Allocation = "uniform"
    scope: Scope = "visual"

    takes_separators = True  # every entry has keys and is attended to

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.allocation in RULES, "allocation", self.allocation, ", ".join(RULES))
        require_choices(self, scope=Scope)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the cache of every layer."""
        return tuple(Site("cache", layer) for layer in range(depth))

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return nothing: a view has the queries and keys of its layer."""
        del site
        return ()

    @property
    def by_head(self) -> bool:
        """Whether each KV head chooses its own entries."""
        return False

    @property
    def repeats_heads(self) -> bool:
        """Whether every query head keeps its own copy of keys and values, as some released codes do."""
        return False

    @property
    def exempt(self) -> tuple[int, int]:
        """Numbers of first and last slots that are never evicted under `scope=prompt`."""
        return (0, 1)

    @property
    def merge_shift(self) -> int:
        """Offset in slots from an evicted entry back to the one that `merge` averages in its place; 0: itself.

        Nonzero only for readings of released codes.
        """
        return 0

    def slack(self, depth: int) -> int:
        """Return by how many entries `allocate` may exceed its total in a decoder of `depth` layers.

        Nonzero only for readings of released codes that miss the budget by rounding; a row records the count.
        """
        del depth
        return 0

    @abstractmethod
    def score(self, view: CacheView) -> Tensor:
        """Return (H, N) scores of the candidates; the highest stay.

        H is 1 (one choice for all heads), the number of KV heads, or the number of query heads if heads are repeated.
        """

    def allocate(self, scores: Sequence[Tensor], total: int) -> Tensor:
        """Return (layers,) how many entries each layer keeps, at least one; they sum to `total`, up to `slack`.

        Args:
            scores: of each layer, as `score` returned them, all on the first layer's device.
            total: entries of all layers together.
        """
        shares = RULES[self.allocation](scores, total / len(scores))
        return entries(shares, total, [layer.shape[-1] for layer in scores])

    def keep(self, scores: Tensor, count: int) -> Tensor:
        """Return (H, count) ascending candidates: the highest of scores (H, N). Cost: O(N log N)."""
        return top(scores, count)

    def merge(self, scores: Tensor, kept: Tensor) -> Tensor | None:
        """Return (H, N): the candidate that each one is averaged into, itself if kept, -1 if dropped.

        None, the default, drops all evicted entries.

        Args:
            scores: (H, N) as `score` returned them.
            kept: (H, K) ascending candidates that stay.
        """
        del scores, kept
        return None

    def fold(
        self, keys: Tensor, values: Tensor, stays: Tensor, visual: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return keys and values (H, L, D) of a layer in which evicted entries are merged into those that stay.

        None, the default, merges none here. Unlike `merge`, it sees the entries themselves.

        Args:
            keys: (H, L, D) of one sample, rotary positions applied.
            values: (H, L, D).
            stays: (H, S) ascending slots of the entries that stay.
            visual: (V,) ascending slots of visual tokens.
        """
        del keys, values, stays, visual
        return None
