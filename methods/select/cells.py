"""Square cells of the patch grid: the cell of each patch, the best patches of each cell, and distances."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.methods.select.topk import ranking, rows_of


def cells(grid: Tensor, side: int) -> Tensor:
    """Return (B, N) the number of each patch's square of `side` x `side` patches.

    Squares start at the first row and column of each image and view; the last ones are cut off where the grid ends.

    Args:
        grid: (B, N, 4) integer coordinates: image, view, row, column.
        side: patches along an edge.

    Cost: O(N).
    """
    places = grid.long() // grid.new_tensor([1, 1, side, side], dtype=torch.long)
    number = torch.zeros_like(places[:, :, 0])
    for place in places.unbind(dim=2):  # the four axes
        number = number * (place.amax(dim=1, keepdim=True) + 1) + place
    return number


def place_in_cell(scores: Tensor, cell: Tensor) -> Tensor:
    """Return (B, N) the rank of each token within its cell (B, N), from 0; equal scores by lower index.

    Raises:
        MethodError: a score is NaN or infinite.

    Cost: O(N log N).
    """
    order = ranking(scores)
    order = order.gather(1, cell.gather(1, order).argsort(dim=1, stable=True))
    number = cell.gather(1, order)
    place = torch.arange(cell.shape[1], device=cell.device).expand_as(cell)
    starts = pad(number[:, 1:] != number[:, :-1], (1, 0))
    start = torch.where(starts, place, 0).cummax(dim=1).values
    return torch.zeros_like(cell).scatter(1, order, place - start)


def best_of_cells(scores: Tensor, cell: Tensor, largest: int, n_true: int) -> Tensor:
    """Return (B, N) booleans: the `n_true` highest among the offers of the cells (B, N) of up to `largest` tokens.

    Every cell offers its best tokens, each the same number (or all that it has): the fewest that make `n_true`
    together.

    Raises:
        MethodError: a score is NaN or infinite.

    Cost: O(N (log N + largest)).
    """
    place = place_in_cell(scores, cell)
    offers = torch.arange(1, largest + 1, device=cell.device).view(1, -1, 1)
    offered = (place.unsqueeze(1) < offers).sum(dim=2)  # (B, largest)
    fewest = 1 + (offered < n_true).sum(dim=1, keepdim=True)
    order = ranking(scores)
    last = (place >= fewest).gather(1, order).to(torch.uint8).argsort(dim=1, stable=True)
    chosen = order.gather(1, last)[:, :n_true]
    return torch.zeros_like(cell, dtype=torch.bool).scatter_(1, chosen, True)


def distances_from(grid: Tensor, index: Tensor) -> Tensor:
    """Return (B, K, N) distances in patches from the tokens `index` (B, K); infinite between images and views.

    Args:
        grid: (B, N, 4) integer coordinates: image, view, row, column.
        index: (B, K) tokens.

    Cost: O(K N).
    """
    offsets = grid[rows_of(index), index].unsqueeze(2) - grid.unsqueeze(1)
    squared = offsets[:, :, :, 2:].float().square().sum(dim=3)
    return squared.sqrt().masked_fill(offsets[:, :, :, :2].any(dim=3), torch.inf)
