"""The patches of a square raster that show an object."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def covered_patches(boxes: Sequence[Sequence[int]], side: int, pixels: int) -> Tensor:
    """Return (side^2,) booleans: the patches of a square raster that a box (x0, y0, x1, y1) covers by half or more."""
    edge = pixels / side
    covered = torch.zeros(side, side, dtype=torch.bool)
    low = torch.arange(side) * edge
    for x0, y0, x1, y1 in boxes:
        across = (torch.clamp(low + edge, max=x1) - low.clamp(min=x0)).clamp(min=0)
        down = (torch.clamp(low + edge, max=y1) - low.clamp(min=y0)).clamp(min=0)
        covered |= down[:, None] * across[None] >= edge**2 / 2
    return covered.flatten()
