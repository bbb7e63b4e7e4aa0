"""An adapter's description of one image or video: its placeholders, and their cost before the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.cost.row_work import NO_WORK, Work


@dataclass(frozen=True, eq=False)
class Item:
    """The placeholders of one image or video in the prompt, in sequence order.

    Attributes:
        grid: (n, 4) image or frame (from 0), view, row and column of each placeholder.
        source: (n, S) projector units that each one is a mixture of, numbered over all calls of the projector.
        share: (n, S) weight of each; None for one unit each.
        prunable: (n,) False for newline and separator tokens; None if all are prunable.
        tile: (n,) crop of the image that each one lies in, 0 for the global view; None: the view.
        work: cost before the decoder.
    """

    grid: Tensor
    source: Tensor
    share: Tensor | None = None
    prunable: Tensor | None = None
    tile: Tensor | None = None
    work: Work = NO_WORK

    def __len__(self) -> int:
        """Return the number of placeholders."""
        return self.grid.shape[0]


def rectangle(images: int, height: int, width: int, view: int = 0) -> Tensor:
    """Return (images * height * width, 4) coordinates of full grids in raster order, image by image."""
    axes = (torch.arange(images), torch.tensor([view]), torch.arange(height), torch.arange(width))
    return torch.cartesian_prod(*axes)
