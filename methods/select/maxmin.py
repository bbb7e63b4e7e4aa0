"""Max-min diversity by farthest-first traversal."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.checks import require_finite
from methods.select.ranking import rows_of


def farthest_first(distances: Tensor, n_keep: int) -> Tensor:
    """Return (B, n_keep) ascending indices that greedily maximise the smallest distance between kept tokens.

    The first pick is the token whose nearest other token is farthest; each next pick is the token farthest from all
    picks so far. Picks are never repeated; equal distances go to the lower index, so identical tokens come in order.

    Args:
        distances: (B, N, N) symmetric distances; the diagonal is ignored.
        n_keep: how many to keep, 1 to N.

    Raises:
        MethodError: a distance is NaN or infinite.

    Cost: O(N^2) for the first pick, then `n_keep` steps of O(N) in one Python loop, without waiting for the device.
    """
    largest = torch.finfo(distances.dtype).max
    others = distances.clone()
    others.diagonal(dim1=1, dim2=2).fill_(largest)
    nearest = require_finite(others.amin(dim=2), "distances")
    gap = torch.full_like(nearest, largest)
    picks = torch.empty(*distances.shape[:1], n_keep, dtype=torch.long, device=distances.device)
    pick = nearest.argmax(dim=1, keepdim=True)  # argmax returns the first of equal maxima
    rows = rows_of(picks)
    for step in range(n_keep):
        picks[:, step : step + 1] = pick
        gap = torch.minimum(gap, distances[rows, pick].squeeze(1))
        gap.scatter_(1, pick, -torch.inf)  # stays below every distance from here on
        pick = gap.argmax(dim=1, keepdim=True)
    return picks.sort(dim=1).values
