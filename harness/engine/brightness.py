"""Luma of the pixels that visual tokens are made of, for methods that look at the image itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

#: ITU-R BT.601.
RED, GREEN, BLUE = 0.299, 0.587, 0.114


@dataclass(frozen=True, eq=False)
class PixelGrids:
    """Normalised pixels as the tower gets them, and their division into the projector's units.

    Attributes:
        pixels: (n, 3, H, W) each, in the order of the projector's calls. Their cells, image by image in raster order,
            are its units.
        cells: cells along an edge of each; images are square.
        side: pixels along the edge of a cell.
        mean: of each colour, by which pixels in [0, 1] were normalised.
        std: standard deviation of each colour.
    """

    pixels: Sequence[Tensor]
    cells: Sequence[int]
    side: int
    mean: Sequence[float]
    std: Sequence[float]

    def luma(self) -> Tensor:
        """Return (units, side + 2, side + 2) luma in [-1, 1]: cells with a border of one pixel, 0 outside an image.

        Cost: O(pixels), and about as much memory again in fp32.
        """
        cells = [
            _cells(self._luma(pixels), count, self.side)
            for pixels, count in zip(self.pixels, self.cells, strict=True)
        ]
        return torch.cat(cells)

    def _luma(self, pixels: Tensor) -> Tensor:
        """Return (n, H, W) luma of normalised pixels."""
        wide = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
        mean, std = wide.new_tensor(self.mean), wide.new_tensor(self.std)
        weight = wide.new_tensor((RED, GREEN, BLUE))
        scale, shift = 2 * weight * std, (weight * (2 * mean - 1)).sum()
        luma: Tensor = (wide * scale.view(-1, 1, 1)).sum(dim=1) + shift
        return luma


def _cells(luma: Tensor, count: int, side: int) -> Tensor:
    """Cut (n, H, W) into (n * count^2, side + 2, side + 2) overlapping cells in raster order."""
    height, width = (count * side - size for size in luma.shape[1:])
    # Patches that do not fill the image leave out pixels at the right and at the bottom (negative padding).
    framed = pad(luma, (1, 1 + width, 1, 1 + height))
    cut = framed.unfold(1, side + 2, side).unfold(2, side + 2, side)
    return cut.flatten(0, 2)
