"""Greedy picks of the token with the smallest of its largest values in the rows of all picks, in two kernels a pick."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

#: Picks after which the largest values so far are stored as one row.
TOGETHER = 4


def rows_for_picks(values: Tensor) -> Tensor:
    """Return (B, N + 1, N) for `greedy_picks`: a copy of (B, N, N) values to change in place, and a row for its use."""
    return torch.cat([values, values[:, :1]], dim=1)


def greedy_picks(rows: Tensor, before: Tensor, first: Tensor, count: int) -> Tensor:
    """Return (B, count) picks in their order, the first of equal ones each time, without a read.

    Args:
        rows: (B, N + 1, N), each token's row of values, which rise with how little the others are wanted beside it; the
            last row is written over, the diagonal infinite.
        before: (B, N) values before any pick, which hold where those of all picks are lower.
        first: (B,) pick.
        count: picks, 1 to N.

    Cost: for each pick one pass over 1 to 5 rows, one over N numbers, and with several samples a sum of numbers.
    """
    n_samples, _, n_tokens = rows.shape
    rows[:, n_tokens] = before
    rows[:, :n_tokens].diagonal(dim1=1, dim2=2).fill_(torch.inf)
    table = rows.flatten(0, 1)
    # Each block of picks stands after the number of the row of all picks before it: together they are one bag.
    bags = torch.full(
        (-(-count // TOGETHER), n_samples, 1 + TOGETHER), n_tokens, device=rows.device
    )
    bags[0, :, 1] = first
    sample = torch.arange(n_samples, device=rows.device)
    lengths = torch.arange(2 + TOGETHER, device=rows.device)
    starts = (lengths.unsqueeze(1) * sample).unbind()
    offset = sample.unsqueeze(1) * (n_tokens + 1)
    for step in range(1, count):
        block, place = divmod(step, TOGETHER)
        previous = bags[block, :, : 1 + place] if place else bags[block - 1]
        if n_samples > 1:
            previous = previous + offset
        start = starts[previous.shape[1]]
        largest = embedding_bag(previous.flatten(), table, start, mode="max")
        if place == 0:
            rows[:, n_tokens] = largest
        torch.argmin(largest, dim=1, out=bags[block, :, 1 + place])
    return bags[:, :, 1:].transpose(0, 1).flatten(1)[:, :count]
