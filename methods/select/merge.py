"""Bookkeeping of merging: how many tokens share a slot."""

from __future__ import annotations

import torch
from torch import Tensor


def slot_sizes(slot: Tensor) -> Tensor:
    """Return (B, N) how many tokens share each token's slot (B, N), in fp32; 0 where the slot is -1. Cost: O(N)."""
    inside = (slot >= 0).float()
    at = slot.clamp(min=0)
    return inside * torch.zeros_like(inside).scatter_add(1, at, inside).gather(1, at)
