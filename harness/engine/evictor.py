"""What a pass calls where cache entries are to go; harness/engine/eviction.py does it.

The engine holds on to these protocols alone, so that the code of eviction belongs to runs that evict and to no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from espalier.harness.engine.layout import Stage


class PassEviction(Protocol):
    """What happens to the cache of one pass."""

    @property
    def held_visual(self) -> Sequence[Sequence[int]]:
        """Visual entries that each layer holds, for each row of the batch; filled by `shorten`."""

    @property
    def held_special(self) -> Sequence[Sequence[int]]:
        """Newline and separator entries likewise; empty where they all stay."""

    def score_layer(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Score a layer from its queries (B, H, M, D) and keys (B, H_kv, M, D)."""

    def shorten(self, cache: Any) -> list[Stage]:
        """Shorten the cache and return what decoding steps must know of each layer."""


class CacheEvictor(Protocol):
    """What a session evicts after each prefill."""

    @property
    def ratio(self) -> float:
        """Share of the candidates that goes; 0 leaves the cache alone."""

    def begin(self, prefill: Any, depth: int) -> PassEviction:
        """Return what carries it out in one pass: a `Prefill` of a decoder of `depth` layers."""
