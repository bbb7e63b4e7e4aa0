"""PyramidKV: "Dynamic KV Cache Compression based on Pyramidal Information Funneling" (Cai et al., arXiv 2406.02069).

Entries are chosen as by SnapKV, with a window of 8 and maxima over 7 slots; layers share the budget as a pyramid, from
2 k - k / beta entries in the first down to k / beta in the last, and add up to it exactly.

official: the released code takes whole steps, and the rounding adds entries to every layer: of k entries a
layer on average, n candidates and L layers,

    low = floor(k / beta), high = 2 k - low, or high = n, low = 2 k - n if that exceeds n;
    layer l keeps high - l floor((high - low) / (L - 1)).

With 128 entries in 32 layers (8 of them the window) that is 4 % too many. Prompts shorter than 2 k share evenly. Keys
and values are repeated for every query head, as in SnapKV's code.

Differs: the window of the released code may extend into the picture; here it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.compressor import Allocation
from espalier.methods.select.budgets import BETA
from espalier.methods.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's choice under a pyramid of budgets.

    Attributes:
        whole_steps: the released code's integers, which overshoot the budget.
    """

    allocation: Allocation = "pyramid"
    window: int = 8
    kernel: int = 7
    pooling: Literal["mean", "max"] = "max"
    whole_steps: bool = False

    def slack(self, depth: int) -> int:
        """Return how many entries whole steps may add: less than one a layer for each step, and rounding."""
        return depth * (depth - 1) // 2 + depth if self.whole_steps else 0

    def allocate(self, scores: Sequence[Tensor], total: int) -> Tensor:
        """Return (layers,) counts: the base's, or the released code's, at least one for each layer."""
        candidates, depth = {layer.shape[-1] for layer in scores}, len(scores)
        # Layers from which a reducer dropped tokens have fewer, which the released code does not know.
        if not self.whole_steps or self.allocation != "pyramid" or len(candidates) > 1:
            return super().allocate(scores, total)
        mean, n = -(-total // depth), candidates.pop()
        low = int(mean // BETA)
        high = 2 * mean - low
        if high >= n:
            low, high = 2 * mean - n, n
        step = (high - low) // max(depth - 1, 1)
        even = n + self.window < 2 * mean
        counts = torch.full((depth,), mean) if even else high - step * torch.arange(depth)
        return counts.clamp(1, n)
