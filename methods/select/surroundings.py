"""Merging of similar patches around a kept patch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from espalier.methods.checks import require_finite
from espalier.methods.select.cells import distances_from
from espalier.methods.select.topk import rows_of

#: Keeps a row of weights defined where the states of a kept patch are all 0.
EPSILON = 1e-12


def taken_in(states: Tensor, grid: Tensor, index: Tensor, still: Tensor, reach: float) -> Tensor:
    """Return (B, K, N) the weight of each patch in the kept ones: 1 of itself, and a share of the others.

    The share is proportional to max(0, cosine) (1 - min(1, distance / reach)); the shares of a row, including the kept
    patch's own, sum to 1.

    Args:
        states: (B, N, D) by which patches are compared.
        grid: (B, N, 4) integer coordinates: image, view, row, column.
        index: (B, K) kept patches.
        still: (B, K) kept patches that absorb nothing.
        reach: distance in patches from which patches are not absorbed.

    Raises:
        MethodError: a cosine is NaN or infinite.

    Cost: O(K N D).
    """
    units = normalize(states.float(), dim=-1)
    alike = units[rows_of(index), index] @ units.transpose(1, 2)
    alike = require_finite(alike, "cosines of tower states").clamp(min=0)
    weight = alike * (1 - (distances_from(grid, index) / reach).clamp(max=1))
    share = weight / weight.sum(dim=2, keepdim=True).clamp(min=EPSILON)
    itself = one_hot(index, grid.shape[1]).bool()
    return torch.where(itself, 1.0, share.masked_fill(still.unsqueeze(2), 0))


def above_quantile(values: Tensor, quantile: float) -> Tensor:
    """Return (B, K) booleans: which values (B, K) lie above their quantile; exact, as nothing is interpolated."""
    # The quantile lies between this order statistic and the next one, which exceeds it unless the two are equal.
    below = math.floor(quantile * (values.shape[1] - 1) + 1e-9)
    return values > values.sort(dim=1).values[:, below : below + 1]
