"""Ranking by score with a fixed rule for ties, and index sets from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from espalier.methods.checks import require_finite


def ranking(scores: Tensor) -> Tensor:
    """Return (B, N) indices by descending score, equal scores by ascending index. Cost: O(N log N).

    `torch.topk` leaves the order of ties open, and it differs between devices; a stable sort does not.

    Raises:
        PlanError: a score is NaN or infinite.
    """
    return require_finite(scores, "scores").argsort(dim=1, descending=True, stable=True)


def top(scores: Tensor, n_keep: int) -> Tensor:
    """Return (B, n_keep) ascending indices of the highest scores (B, N)."""
    return ranking(scores)[:, :n_keep].sort(dim=1).values


def indices_of(mask: Tensor, n_true: int) -> Tensor:
    """Return (B, n_true) ascending indices of the true entries of a mask (B, N) with `n_true` of them in each row.

    A stable sort has a fixed output shape, so unlike `nonzero` it does not make the device wait. Cost: O(N log N).
    """
    return (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_true]


def rows_of(indices: Tensor) -> Tensor:
    """Return (B, 1) row numbers that go with indices (B, K) in advanced indexing."""
    return torch.arange(indices.shape[0], device=indices.device).unsqueeze(1)


class Chosen(NamedTuple):
    """The tokens chosen by a greedy rule, filled up to an exact count.

    Attributes:
        kept: (B, K) ascending indices.
        spare: (B,) how many of them fill up: the rule had nothing left to choose.
    """

    kept: Tensor
    spare: Tensor


def filled_up(chosen: Tensor, order: Tensor, n_keep: int) -> Chosen:
    """Return `n_keep` indices: the true entries of `chosen` (B, N), then the first others of a ranking (B, N).

    If more entries are true, the first of them in the ranking, and `spare` is negative. Cost: O(N log N).
    """
    n_tokens = order.shape[1]
    place = torch.arange(n_tokens, device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place)
    kept = (rank + n_tokens * ~chosen).argsort(dim=1)[:, :n_keep].sort(dim=1).values
    return Chosen(kept, n_keep - chosen.sum(dim=1))
