"""Even coverage of the patch grid: tiles, quotas and regions, for any number of images, tiles and rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.select.quotas import top_of_groups
from espalier.methods.select.topk import indices_of


@dataclass(frozen=True)
class Tiles:
    """The tile of each token, and the sizes of the tiles.

    Tables have N columns, one for each tile there could be; absent tiles have size 0.

    Attributes:
        index: (B, N) running number of each token's (image, tile), in sequence order.
        size: (B, N) tokens of each tile.
        height: (B, N) rows of each tile.
        width: (B, N) columns of each tile.
    """

    index: Tensor
    size: Tensor
    height: Tensor
    width: Tensor

    @classmethod
    def of(cls, grid: Tensor) -> Tiles:
        """Read the tiles off the coordinates (B, N, 4); tokens of one tile stand together in the sequence."""
        changes = (grid[:, 1:, :2] != grid[:, :-1, :2]).any(dim=2)
        index = torch.nn.functional.pad(changes.long().cumsum(dim=1), (1, 0))
        empty = torch.zeros_like(index)
        extent = [
            empty.scatter_reduce(1, index, grid[:, :, axis].long() + 1, "amax") for axis in (2, 3)
        ]
        size = empty.scatter_add(1, index, torch.ones_like(index))
        return cls(index=index, size=size, height=extent[0], width=extent[1])

    def quotas(self, n_keep: int) -> Tensor:
        """Return (B, N) how many of `n_keep` each tile gets: in proportion to its size, largest remainders first."""
        total = self.index.shape[1]
        share, remainder = self.size * n_keep // total, self.size * n_keep % total
        missing = n_keep - share.sum(dim=1, keepdim=True)
        by_remainder = remainder.argsort(dim=1, descending=True, stable=True)
        place = by_remainder.argsort(dim=1)
        return share + (place < missing).long()

    def starts(self, table: Tensor) -> Tensor:
        """Return (B, N) running sums of a table before each tile."""
        return table.cumsum(dim=1) - table

    def of_token(self, table: Tensor) -> Tensor:
        """Return (B, N) the entry of each token's tile."""
        return table.gather(1, self.index)


def top_in_tiles(scores: Tensor, grid: Tensor, n_keep: int) -> Tensor:
    """Return (B, n_keep) ascending indices of the highest scores (B, N) in each tile, by `Tiles.quotas`."""
    tiles = Tiles.of(grid)
    return top_of_groups(scores, tiles.index, tiles.quotas(n_keep), n_keep)


def regions(grid: Tensor, n_keep: int) -> tuple[Tensor, Tensor]:
    """Cut the patch grid into exactly `n_keep` contiguous regions of nearly equal size and shape.

    Each tile gets its quota k. A full tile of h rows and w columns is cut into r = round(sqrt(k h / w)) bands of rows,
    clamped to what is possible, and band b into floor((b+1) k / r) - floor(b k / r) runs of columns. A tile with gaps
    (something was dropped before) is cut into k runs of its sequence instead. A tile without quota has no region.

    Args:
        grid: (B, N, 4) integer coordinates: image, tile, row, column.
        n_keep: how many regions, 1 to N.

    Returns:
        The region of each token (B, N), -1 for none, and each region's central token (B, n_keep), ascending.

    Cost: O(N log N), no Python loop.
    """
    tiles = Tiles.of(grid)
    quotas = tiles.quotas(n_keep)
    first = tiles.of_token(tiles.starts(quotas))
    quota, size, height, width = (
        tiles.of_token(table) for table in (quotas, tiles.size, tiles.height, tiles.width)
    )
    k = quota.clamp(min=1)
    ideal = (k * height / width).sqrt().round().long()
    bands = torch.maximum(torch.minimum(ideal, torch.minimum(height, k)), (k + width - 1) // width)
    row, column = grid[:, :, 2].long(), grid[:, :, 3].long()
    band = _segment(row, bands, height)
    before = band * k // bands
    runs = (band + 1) * k // bands - before
    in_plane = before + _segment(column, runs, width)

    place = torch.arange(grid.shape[1], device=grid.device)
    place = place - tiles.of_token(tiles.starts(tiles.size))
    full = size == height * width
    local = torch.where(full, in_plane, _segment(place, k, size))
    region = torch.where(quota > 0, first + local, -1)
    # A full tile is centred in the plane, a tile with gaps in its sequence: there the column is set to a constant.
    centre = _centres(region, torch.where(full, row, place), torch.where(full, column, 0), n_keep)
    return region, centre


def _segment(place: Tensor, parts: Tensor, length: Tensor) -> Tensor:
    """Return the part that holds `place` when 0..length-1 is cut at floor(i length / parts)."""
    return ((place + 1) * parts - 1) // length


def _centres(region: Tensor, row: Tensor, column: Tensor, n_keep: int) -> Tensor:
    """Return (B, n_keep) the token in the middle of each region, the upper left one of equal middles."""
    slot = torch.where(region < 0, n_keep, region)
    central = region >= 0
    for place in (row, column):
        table = torch.zeros(place.shape[0], n_keep + 1, dtype=torch.long, device=place.device)
        low = table.scatter_reduce(1, slot, place, "amin", include_self=False)
        high = table.scatter_reduce(1, slot, place, "amax", include_self=False)
        central &= ((low + high) // 2).gather(1, slot) == place
    return indices_of(central, n_keep)
