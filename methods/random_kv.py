"""Random cache entries: the floor that a compressor must beat at equal bytes.

Uniform sampling without replacement, separately in each layer, from a generator seeded by the run and the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.compressor import CacheCompressor, CacheView


@dataclass(frozen=True)
class RandomKV(CacheCompressor):
    """Keeps entries at random, one choice for all heads of a layer."""

    draws = True

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N) random numbers. Cost: O(N)."""
        noise = torch.rand(1, len(view.candidates), generator=view.generator)
        return noise.to(view.keys.device)
