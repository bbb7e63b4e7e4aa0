"""Greedy picks by the largest value in the rows of all picks so far, in two kernels a pick, without a read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

#: Picks after which the largest values so far are stored as one row.
TOGETHER = 4


def rows_for_picks(values: Tensor, before: float, scaled: Callable[[Tensor], object]) -> Tensor:
    """Return (N + 1, N): a copy of (N, N) values, infinite on the diagonal, and a row of what holds before any pick.

    `scaled` changes the copy in place, each number by itself.
    """
    n_tokens = len(values)
    rows = values.new_full((n_tokens + 1, n_tokens), before)
    copied = rows[:n_tokens].copy_(values)
    scaled(copied)
    copied.fill_diagonal_(torch.inf)
    return rows


def greedy_picks(
    rows: Tensor, first: Tensor, count: int, choose: Callable[[Tensor, Tensor], object]
) -> Tensor:
    """Return (count,) picks in their order.

    Args:
        rows: of `rows_for_picks`; the last is written over.
        first: () pick.
        count: picks, 1 to N.
        choose: writes the next pick into its second argument (), by the (1, N) largest values in the rows of the picks
            so far, which are infinite for these.

    Cost: for each pick one pass over 1 to 5 rows, and `choose`.
    """
    n_tokens = rows.shape[1]
    n_blocks = -(-count // TOGETHER)
    # Each block of picks stands after the number of the row of all picks before it: together they are one bag.
    bags = torch.full((n_blocks, 1 + TOGETHER), n_tokens, device=rows.device)
    bags[0, 1] = first
    places = bags.flatten().unbind()
    start = torch.zeros(1, dtype=torch.long, device=rows.device)
    for step in range(1, count):
        block, place = divmod(step, TOGETHER)
        previous = bags[block, : 1 + place] if place else bags[block - 1]
        largest = embedding_bag(previous, rows, start, mode="max")
        if place == 0:
            rows[n_tokens] = largest[0]
        choose(largest, places[(1 + TOGETHER) * block + 1 + place])
    return bags[:, 1:].flatten()[:count]
