"""Protocols of cache eviction, implemented by harness/engine/eviction.py.

The engine depends on these protocols only, so that the code of eviction is part of the runs that evict, and of no
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from espalier.harness.engine.layout import Stage


class PassEviction(Protocol):
    """Eviction from the cache of one pass."""

    @property
    def held_visual(self) -> Sequence[Sequence[int]]:
        """Visual entries that each layer holds, for each row of the batch; filled by `shorten`."""

    @property
    def held_special(self) -> Sequence[Sequence[int]]:
        """Newline and separator entries that each layer holds, for each row; empty if all of them stay."""

    def score_layer(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Score a layer from its queries (B, H, M, D) and keys (B, H_kv, M, D)."""

    def shorten(self, cache: Any) -> list[Stage]:
        """Shorten the cache and return each layer's stage for the decoding steps."""


class CacheEvictor(Protocol):
    """Cache eviction of a session, after each prefill."""

    @property
    def ratio(self) -> float:
        """Share of the candidates to evict; 0 leaves the cache unchanged."""

    def begin(self, prefill: Any, depth: int) -> PassEviction:
        """Return the eviction of one pass: a `Prefill` of a decoder of `depth` layers."""
