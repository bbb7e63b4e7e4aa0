"""Evenly spaced cache entries: the same share of every part of the picture, the same entries in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.compressor import CacheCompressor, CacheView


@dataclass(frozen=True)
class UniformKV(CacheCompressor):
    """Keeps entries at even distances, one choice for all heads and layers."""

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N): the van der Corput order of the places; its first k are spread evenly. Cost: O(N log N)."""
        n = len(view.candidates)
        bits = max(1, (n - 1).bit_length())
        places = torch.arange(n, device=view.keys.device)
        reversed_bits = sum(((places >> bit) & 1) << (bits - 1 - bit) for bit in range(bits))
        assert isinstance(reversed_bits, Tensor)
        falling = torch.arange(n, 0, -1, dtype=torch.float32, device=places.device)
        return torch.empty_like(falling).scatter_(0, reversed_bits.argsort(), falling).unsqueeze(0)
