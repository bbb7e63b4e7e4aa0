"""Random cache entries: the floor that a compressor must beat at equal bytes.

Uniform sampling without replacement, separately in each layer, from a generator seeded by the run and the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import MethodError
from espalier.methods.compressor import CacheCompressor, CacheView


@dataclass(frozen=True)
class RandomKV(CacheCompressor):
    """Keeps entries at random, one choice for all heads of a layer."""

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N) random numbers. Cost: O(N)."""
        if view.generator is None:
            raise MethodError("random_kv: the view has no generator; one for each sample is needed")
        noise = torch.rand(1, len(view.candidates), generator=view.generator)
        return noise.to(view.keys.device)
