"""What a session evicts: a compressor and how much of the cache it may leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from methods.compressor import CacheCompressor

#: Ratios are decimal: a count this close to a half is one.
TIE = 1e-9


@dataclass(frozen=True)
class Evicting:
    """What a session evicts after each prefill.

    Attributes:
        compressor: scores entries and splits the budget over layers.
        ratio: share of the candidates that goes, on average over layers; 0 leaves the cache alone.
    """

    compressor: CacheCompressor
    ratio: float

    def total(self, candidates: Sequence[int]) -> int:
        """Return the entries that all layers keep together: the share (1 - ratio), half up, one a layer at least."""
        asked = math.floor((1 - self.ratio) * sum(candidates) + 0.5 + TIE)
        return max(asked, len(candidates))
