"""The most recent cache entries: the last tokens of the picture, as a sliding window keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from espalier.methods.compressor import CacheCompressor, CacheView


@dataclass(frozen=True)
class RecentKV(CacheCompressor):
    """Keeps the last entries, one choice for all heads and layers."""

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N): a candidate's slot. Cost: O(N)."""
        return view.candidates.float().unsqueeze(0)
