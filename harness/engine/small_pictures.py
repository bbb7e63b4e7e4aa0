"""Pictures that lose detail before the tower: reduced to a share of their pixels, and enlarged to their size again."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import interpolate

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
