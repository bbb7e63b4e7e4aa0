"""Pixels as the tower gets them: their luma, pictures that lose detail, and the pixels of its patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, unfold
from torch.utils.hooks import RemovableHandle

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


#: Both ways, with a low-pass filter in reducing: what image processors do.
resize = partial(interpolate, mode="bicubic", antialias=True, align_corners=False)


def coarse(pixels: Tensor, share: float) -> Tensor:
    """Return pixels (..., C, H, W) with the detail of pictures of sqrt(share) H x sqrt(share) W, at least 1 x 1.

    Cost: O(pixels), in fp32 for narrower types.
    """
    size = pixels.shape[-2:]
    small = [max(1, round(math.sqrt(share) * edge)) for edge in size]
    wide = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
    flat = wide.reshape(-1, *pixels.shape[-3:])
    enlarged: Tensor = resize(resize(flat, size=small), size=size)
    return enlarged.view(pixels.shape).to(pixels.dtype)


class PatchPixels:
    """Holds the pixels of the running tower call, as (P, N, F) numbers in [0, 1].

    Args:
        tower: its first convolution cuts pictures into patches.
        mean: of each colour, by which pixels in [0, 1] were normalised.
        std: standard deviation of each colour.
    """

    def __init__(self, tower: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        self._embedding = next(part for part in tower.modules() if isinstance(part, nn.Conv2d))
        self._mean, self._std = mean, std
        self._handle: RemovableHandle
        self.pixels: Tensor

    def open(self) -> None:
        """Watch the convolution."""
        self._handle = self._embedding.register_forward_pre_hook(self._store)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _store(self, embedding: nn.Conv2d, arguments: tuple[Tensor]) -> None:
        pictures = arguments[0].to(torch.promote_types(arguments[0].dtype, torch.float32))
        std, mean = (
            pictures.new_tensor(values).view(-1, 1, 1) for values in (self._std, self._mean)
        )
        patches = unfold(pictures * std + mean, embedding.kernel_size, stride=embedding.stride)
        self.pixels = patches.transpose(1, 2)
