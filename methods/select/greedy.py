"""Greedy picks of the token with the smallest of its largest values in the rows of all picks, in two kernels a pick."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

#: Picks after which the largest values so far are stored as one row.
TOGETHER = 4


def rows_for_picks(values: Tensor) -> Tensor:
    """Return (N + 1, N) for `greedy_picks`: a copy of (N, N) values, to be changed in place, and a row for its use."""
    return torch.cat([values, values[:1]])


def greedy_picks(rows: Tensor, before: Tensor, first: Tensor, count: int) -> Tensor:
    """Return (count,) picks in their order, the first of equal ones each time, without a read.

    Args:
        rows: (N + 1, N), each token's row of values, which rise with how little the others are wanted beside it; the
            last row is written over, the diagonal infinite.
        before: (N,) values before any pick, which hold where those of all picks are lower.
        first: () pick.
        count: picks, 1 to N.

    Cost: for each pick one pass over 1 to 5 rows, and one over N numbers.
    """
    n_tokens = rows.shape[1]
    rows[n_tokens] = before
    rows[:n_tokens].fill_diagonal_(torch.inf)
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
        torch.argmin(largest, out=places[(1 + TOGETHER) * block + 1 + place])
    return bags[:, 1:].flatten()[:count]
