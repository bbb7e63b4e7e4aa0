"""Map images to batch rows and split each row's budget over its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.engine.layout import Layout
from espalier.methods.base import MethodError


@dataclass(frozen=True, eq=False)
class ImageOwners:
    """Batch rows of the images of one tower call.

    Attributes:
        rows: batch row of each image.
        counts: number of patches of each image that tokens are made of.
        lives: (P, N) mask of these patches.
    """

    rows: list[int]
    counts: list[int]
    lives: Tensor


def image_owners(layout: Layout, first: int, n_pictures: int, n_units: int) -> ImageOwners:
    """Return the owners of one call's `n_pictures` images, read from a layout.

    Args:
        layout: of the batch.
        first: number of the call's first unit in the batch.
        n_pictures: images of the call.
        n_units: projector units of each image.

    Raises:
        MethodError: a row has images in this call and in another.
    """
    rows = [0] * n_pictures
    lives = torch.zeros(n_pictures * n_units, dtype=torch.bool)
    for row in range(layout.rows):
        units = row_units(layout, row).cpu() - first
        inside = (units >= 0) & (units < len(lives))
        if not inside.all() and inside.any():
            raise MethodError(
                "tower sites need all images of a sample in one call of the tower; this model makes several"
            )
        units = units[inside]
        lives[units] = True
        for picture in (units // n_units).unique().tolist():
            rows[picture] = row
    table = lives.view(n_pictures, n_units)
    counts: list[int] = table.sum(1).tolist()
    return ImageOwners(rows, counts, table)


def row_units(layout: Layout, row: int) -> Tensor:
    """Return (n,) the projector unit of each visual token of a row with tokens that are single units."""
    source = layout.source[row, : layout.counts[row]]
    if layout.share is None:
        return source[:, 0]
    share = layout.share[row, : layout.counts[row]]
    return source.gather(1, share.argmax(1, keepdim=True))[:, 0]


def picture_counts(
    counts: Sequence[int], rows: Sequence[int], keep: Sequence[int]
) -> dict[int, int]:
    """Split each row's `keep` over its images, in proportion to their patches."""
    counts_kept: dict[int, int] = {}
    for row in sorted(set(rows)):
        members = [picture for picture, owner in enumerate(rows) if owner == row]
        shares = share_out([counts[picture] for picture in members], keep[row])
        counts_kept.update(zip(members, shares, strict=True))
    return counts_kept


def share_out(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` in proportion to `sizes`, with no share above its size (Webster's rule; ties go to the first).

    A divisor rule never gives less if `total` grows, so a schedule that falls from site to site falls in every image.
    Cost: O(N log N).
    """
    size = torch.tensor(sizes)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), size)
    rank = torch.arange(int(size.sum())) - torch.repeat_interleave(size.cumsum(0) - size, size)
    quotient = size[owner].double() / (2 * rank + 1)
    winners = quotient.argsort(descending=True, stable=True)[:total]
    shares: list[int] = torch.bincount(owner[winners], minlength=len(sizes)).tolist()
    return shares
