"""AnyRes pictures: a global view, and crops packed to one plane with a newline token after each row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem

#: From (tiles, patches, C) features of one image to its (placeholders, C) tokens, newlines as NaN.
Pack = Callable[[Tensor], Tensor]


def packed_item(
    pack: Pack,
    shape: tuple[int, int],
    side: int,
    first: int,
    class_token: bool,
    view: int | None = None,
) -> VisualItem:
    """Return the item of one image: its global view, then its crops as one plane with a newline after each row.

    If the packing pools tiles or shrinks a large plane, each token blends four patches. Interpolation is linear, so the
    packed coordinates give the four patches and their weights.

    Args:
        pack: packing of the model.
        shape: rows and columns of crops, (0, 0) for an image of one tile.
        side: patches along the edge of a tile.
        first: number of the image's first projector unit; units of the global view come first.
        class_token: whether the tower adds a token to each tile.
        view: tokens along the edge of the global view, if the packing pools tiles; None: `side`.
    """
    patches, tiles = side**2, 1 + shape[0] * shape[1]
    raster, global_grid = (
        torch.cartesian_prod(torch.arange(edge), torch.arange(edge))
        for edge in (side, view or side)
    )
    corner = torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1])) * side
    corner = torch.cat([torch.zeros(1, 2, dtype=torch.long), corner])
    packed = pack((corner[:, None] + raster).double())
    newline = packed[:, 0].isnan()
    prunable = ~newline
    cropped = torch.arange(len(packed)) >= len(global_grid)
    low = packed.nan_to_num().floor().long()
    part = packed.nan_to_num() - low

    def unit(place: Tensor) -> Tensor:
        tile = _tile(place, shape[1], side, cropped)
        offset = place % side
        return first + tile * patches + offset[:, 0] * side + offset[:, 1]

    corners = [low + torch.tensor(step) for step in ((0, 0), (0, 1), (1, 0), (1, 1))]
    weights = [
        (1 - part).prod(1),
        (1 - part[:, 0]) * part[:, 1],
        part[:, 0] * (1 - part[:, 1]),
        part.prod(1),
    ]
    source, share = unit(low).unsqueeze(1), None
    if bool((part > 0).any()):
        share = torch.stack(weights, dim=1)
        # Corners with weight 0 may lie outside the plane.
        source = torch.where(share > 0, torch.stack([unit(c) for c in corners], 1), source)
    n_tokens = patches + int(class_token)
    return VisualItem(
        grid=_grid(newline, cropped, global_grid),
        source=source,
        share=share,
        prunable=prunable,
        tile=_tile(low, shape[1], side, cropped),
        work=Work(tokens=tiles * n_tokens, pairs=tiles * n_tokens**2, units=tiles * patches),
    )


def _tile(place: Tensor, columns: int, side: int, cropped: Tensor) -> Tensor:
    """Return the tile of each position: 0 for the global view, then the crops in raster order."""
    crop = place // side
    return torch.where(cropped, 1 + crop[:, 0] * columns + crop[:, 1], 0)


def _grid(newline: Tensor, cropped: Tensor, raster: Tensor) -> Tensor:
    """Return (n, 4) coordinates: view 0 in raster order, view 1 row by row between its newlines."""
    before = newline.long().cumsum(0) - newline.long()
    place = torch.arange(len(newline))
    starts = torch.cat([torch.tensor([len(raster)]), newline.nonzero()[:, 0] + 1])
    column = place - starts[before]
    grid = torch.stack([torch.zeros_like(place), cropped.long(), before, column], dim=1)
    grid[: len(raster), 2:] = raster
    return grid
