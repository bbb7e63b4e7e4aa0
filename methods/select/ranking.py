"""Ranking by score with a fixed rule for ties, and the index sets that follow from it."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.checks import require_finite


def ranking(scores: Tensor) -> Tensor:
    """Return (B, N) indices by descending score, equal scores by ascending index. Cost: O(N log N).

    `torch.topk` leaves the order of ties open, and it differs between devices; a stable sort does not.

    Raises:
        MethodError: a score is NaN or infinite.
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
