"""Recycling of deleted tokens: the best of them are clustered, and each cluster stands at its centre's place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from espalier.methods.plans import Assignment, Plan
from espalier.methods.select.density import density_peaks, nearest_centre, squared_distances
from espalier.methods.select.merge import slot_sizes
from espalier.methods.select.similarity import cosine
from espalier.methods.select.topk import indices_of, rows_of


def split(n_tokens: int, keep: int, tau: float, theta: int) -> tuple[int, int, int]:
    """Return the number of N tokens kept as they are, the number recycled, and the number of clusters.

    Of the D other tokens floor(tau D) + 1 are recycled, into floor(recycled / theta) + 1 clusters. Kept tokens and
    clusters make exactly `keep`; clusters are at most half of it.
    """
    if tau == 0 or keep == n_tokens:
        return keep, 0, 0
    for n_top in range(keep, -1, -1):
        # The small term keeps 0.3 * 10 from becoming 2.999...
        n_recycled = math.floor(tau * (n_tokens - n_top) + 1e-9) + 1
        n_clusters = min(n_recycled // theta + 1, n_recycled, keep // 2)
        if n_top + n_clusters <= keep:
            break
    return n_top, n_recycled, keep - n_top


def recycle(
    tokens: Tensor, order: Tensor, counts: tuple[int, int, int], by_cosine: bool, summed: bool
) -> Plan:
    """Return the plan that keeps the first tokens of a ranking and clusters those that follow.

    Centres are found by DPC-kNN with as many neighbours as clusters (methods/select/density.py).

    Args:
        tokens: (B, N, D).
        order: (B, N) ranking.
        counts: tokens kept as they are, tokens recycled, clusters.
        by_cosine: a recycled token joins the centre with the highest cosine; otherwise the nearest one.
        summed: a cluster becomes the sum of its tokens; otherwise their mean.

    Raises:
        MethodError: a distance is NaN or infinite.

    Cost: O(N log N + R^2 (D + log R)) for R recycled tokens.
    """
    n_top, n_recycled, n_clusters = counts
    kept = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :n_top], True)
    if n_clusters == 0:
        return Plan(indices_of(kept, n_top))
    pool = order[:, n_top : n_top + n_recycled].sort(dim=1).values
    points = tokens[rows_of(pool), pool]
    squared = squared_distances(points)
    centres = density_peaks(squared, n_clusters, n_clusters)
    closeness = cosine(points) if by_cosine else -squared
    joined = pool.gather(1, centres).gather(1, nearest_centre(closeness, centres))
    kept.scatter_(1, pool.gather(1, centres), True)

    place = kept.cumsum(dim=1) - 1
    slot = torch.where(kept, place, -1).scatter(1, pool, place.gather(1, joined))
    size = slot_sizes(slot)
    share = size.clamp(max=1) if summed else 1 / size.clamp(min=1)
    return Plan(indices_of(kept, n_top + n_clusters), Assignment(slot, share))
