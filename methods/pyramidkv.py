"""PyramidKV: "Dynamic KV Cache Compression based on Pyramidal Information Funneling" (Cai et al., arXiv 2406.02069).

Entries are chosen as by SnapKV, with a window of 8 and maxima over 7 slots; layers share the budget as a pyramid, from
2 k - k / beta entries in the first down to k / beta in the last. The released integers overshoot the budget, by 4 % of
128 entries in 32 layers; here the layers add up to it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from methods.compressor import Allocation
from methods.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's choice under a pyramid of budgets."""

    allocation: Allocation = "pyramid"
    window: int = 8
    kernel: int = 7
    pooling: Literal["mean", "max"] = "max"
