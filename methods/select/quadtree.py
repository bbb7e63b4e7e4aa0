"""Quadtrees over the frames of a video: cells of 2 x 2 tokens and more that stay whole where their parts are alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

#: A frame is halved until a side has this many cells or fewer.
COARSEST = 2


class Axis(NamedTuple):
    """Rows or columns of a frame, h of them, in the cells of one level.

    Attributes:
        cell: (h,) the cell that each lies in, in ascending order.
        share: (h,) its weight in the mean of the cell.
        parts: (H,) how many cells of the finer level each cell has, 1 or 2.
        parent: (H',) the cell of each of the finer level's cells.
    """

    cell: Tensor
    share: Tensor
    parts: Tensor
    parent: Tensor

    @classmethod
    def of(cls, size: int, like: Tensor) -> Axis:
        """Return the finest level: every row is a cell."""
        rows = torch.arange(size, device=like.device)
        return cls(rows, like.new_ones(size), torch.ones_like(rows), rows)

    def halved(self) -> Axis:
        """Return the next level: pairs of cells; an odd count leaves the first cell by itself."""
        cells = torch.arange(len(self.parts), device=self.cell.device)
        parent = (cells + len(cells) % 2) // 2
        parts = torch.bincount(parent)
        cell = parent[self.cell]
        return Axis(cell, self.share / parts[cell], parts, parent)

    @property
    def first(self) -> Tensor:
        """Return (h,) the first row of the cell that each row lies in."""
        return torch.searchsorted(self.cell, self.cell)


class Cells(NamedTuple):
    """The cells that cover the frames of a video.

    Attributes:
        corner: (T n,) index in the video of the first token of each token's cell.
        weight: (T n,) weight of each token in the mean of its cell.
    """

    corner: Tensor
    weight: Tensor


def cells(tokens: Tensor, root: int, threshold: float, fewest: int) -> Cells:
    """Return the cells that stay whole: their parts all have at least a cosine `threshold` with their mean.

    The mean of a cell is that of its parts, one to four of the finer level. A cell with fewer than four must be as
    similar to the frame's first cell of the finer level, as in STTM's code. From the coarsest level on, a cell that
    does not stay whole is split into its parts; cells above the threshold are split too, the least similar first, until
    there are `fewest` cells.

    Args:
        tokens: (T, h, w, D) of a video.
        root: level from which on cells are split, counted from the coarsest; a frame with fewer levels is not merged.
        threshold: cosine.
        fewest: cells of all frames together, at most T h w.

    Cost: O(N (D + log N)) for N tokens; two device synchronisations.
    """
    n_frames, height, width, _ = tokens.shape
    levels = [(Axis.of(height, tokens), Axis.of(width, tokens))]
    while min(len(axis.parts) for axis in levels[-1]) > COARSEST:
        rows, columns = levels[-1]
        levels.append((rows.halved(), columns.halved()))
    levels = levels[: max(1, len(levels) - root)]
    alike = []
    for _ in levels[1:]:
        tokens, likeness = halved(tokens)
        alike.append(likeness)
    for n in range(len(alike) - 2, -1, -1):  # a part is split only after its cell
        rows, columns = levels[n + 2]
        alike[n] = alike[n].maximum(alike[n + 1][:, rows.parent][:, :, columns.parent])
    stay_masks = cell_masks(alike, levels, threshold, fewest, tokens.shape[:3].numel())
    level = torch.zeros(n_frames, height * width, dtype=torch.long, device=tokens.device)
    for (rows, columns), stays in zip(levels[1:], stay_masks, strict=True):
        level += stays[:, rows.cell][:, :, columns.cell].flatten(1)
    place = torch.arange(height * width, device=tokens.device)
    first = [(r.first.unsqueeze(1) * width + c.first).flatten() for r, c in levels]
    share = [(r.share.unsqueeze(1) * c.share).flatten() for r, c in levels]
    start = torch.arange(n_frames, device=tokens.device).unsqueeze(1) * height * width
    corner = torch.stack(first)[level, place] + start
    return Cells(corner.flatten(), torch.stack(share)[level, place].flatten())


def halved(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means (T, H, W, D) of cells of tokens (T, h, w, D), and the lowest cosine of each with its parts."""
    odd_rows, odd_columns = (size % 2 for size in tokens.shape[1:3])
    corner = tokens[:, :1, :1]
    tokens = torch.cat([tokens[:, :odd_rows], tokens], dim=1)  # the first row by itself: twice
    tokens = torch.cat([tokens[:, :, :odd_columns], tokens], dim=2)
    lines = (tokens[:, ::2] + tokens[:, 1::2]).mul_(0.25)
    means = lines[:, :, ::2] + lines[:, :, 1::2]
    parts = tokens.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    products = (parts * means[:, :, None, :, None]).sum(dim=5)
    lengths = parts.norm(dim=5) * means.norm(dim=3)[:, :, None, :, None]
    alike = (products / lengths.clamp(min=1e-8)).amin(dim=(2, 4)).clamp(max=1)
    for edge in (slice(0, odd_rows), slice(None)), (slice(None), slice(0, odd_columns)):
        like_corner = cosine_similarity(means[:, *edge], corner, dim=3)
        alike[:, *edge] = alike[:, *edge].minimum(like_corner)
    alike[:, : odd_rows * odd_columns, :1] = 1.0  # exactly, for a cell of one part
    return means, alike


def cell_masks(
    alike: list[Tensor],
    levels: list[tuple[Axis, Axis]],
    threshold: float,
    fewest: int,
    n_cells: int,
) -> list[Tensor]:
    """Return booleans (T, H, W) for each level from the second on: whether its cells stay whole, or would.

    Args:
        alike: lowest cosine (T, H, W) of each cell with its parts, for each level from the second on.
        levels: rows and columns, the finest first.
        threshold: cosine from which a cell stays whole.
        fewest: cells of all frames that must be left.
        n_cells: cells of the coarsest level.
    """
    if not alike:
        return []
    coarse_first = alike[::-1]
    gains = [
        (rows.parts.unsqueeze(1) * columns.parts - 1).expand_as(likeness).flatten()
        for (rows, columns), likeness in zip(levels[:0:-1], coarse_first, strict=True)
    ]
    order = torch.cat([likeness.flatten() for likeness in coarse_first]).argsort(stable=True)
    n_left = n_cells + torch.cat(gains)[order].cumsum(dim=0)
    n_below = sum(int((likeness < threshold).sum()) for likeness in alike)
    n_needed = int((n_left < fewest).sum()) + 1 if n_cells < fewest else 0
    mask = torch.ones_like(order, dtype=torch.bool)
    mask[order[: max(n_below, n_needed)]] = False
    sizes = [likeness.numel() for likeness in coarse_first]
    parts = mask.split(sizes)
    return [part.view_as(likeness) for part, likeness in zip(parts, coarse_first, strict=True)][
        ::-1
    ]
