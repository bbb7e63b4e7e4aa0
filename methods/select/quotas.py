"""Exact quotas: the number of tokens that each group of a partition keeps, and the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.select.topk import indices_of, ranking


def apportion(weights: Tensor, sizes: Tensor, total: int | Tensor) -> Tensor:
    """Return (B, G) integers with sum `total`, in proportion to the weights, each at most its group's size.

    The surplus of a full group goes to the others, again in proportion to their weights; only when all groups with
    weight are full do the others get the remainder, evenly. Fractions are settled by largest remainders, equal ones by
    the lower index.

    Args:
        weights: (B, G), finite, 0 or more.
        sizes: (B, G) integers, 0 for an absent group.
        total: at most the sum of each row of sizes; (B, 1) where rows have their own.

    Cost: O(G log G), no Python loop.
    """
    weight = weights.double()
    weight = weight + 1e-12 * weight.sum(dim=1, keepdim=True) + 1e-300
    weight = weight * (sizes > 0)
    # Groups fill up in the order of size over weight: find those that are full when `total` is spent.
    filling, order = (sizes / weight.clamp(min=1e-300)).sort(dim=1, stable=True)
    size, remaining = sizes.gather(1, order), weight.gather(1, order).flip(1).cumsum(1).flip(1)
    full = torch.zeros_like(sizes, dtype=torch.bool).scatter(
        1, order, size.cumsum(1) - size + filling * remaining <= total
    )
    spare = total - (sizes * full).sum(dim=1, keepdim=True)
    open_weight = weight * ~full
    share = spare * open_weight / open_weight.sum(dim=1, keepdim=True).clamp(min=1e-300)
    share = (
        share * 2**30
    ).round() / 2**30  # so that rounding decides neither ties nor whole numbers
    floors = torch.where(full, sizes, torch.minimum(share.floor().long(), sizes))
    remainder = (share - floors).masked_fill(full, -1)
    missing = total - floors.sum(dim=1, keepdim=True)
    place = remainder.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return floors + (place < missing).long()


def best_of_groups(scores: Tensor, group: Tensor, quotas: Tensor) -> Tensor:
    """Return (B, N) booleans: the `quotas` (B, G) highest scores (B, N) of each group; `group` (B, N) numbers them.

    Raises:
        MethodError: a score is NaN or infinite.

    Cost: O(N log N).
    """
    order = ranking(scores)
    grouped = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    number = group.gather(1, grouped)
    sizes = torch.zeros_like(quotas).scatter_add(1, group, torch.ones_like(group))
    starts = sizes.cumsum(dim=1) - sizes
    place = torch.arange(scores.shape[1], device=scores.device) - starts.gather(1, number)
    chosen = place < quotas.gather(1, number)
    return torch.zeros_like(chosen).scatter(1, grouped, chosen)


def top_of_groups(scores: Tensor, group: Tensor, quotas: Tensor, n_keep: int) -> Tensor:
    """Return (B, n_keep) ascending indices of the highest scores of each group; each row of quotas sums to `n_keep`."""
    return indices_of(best_of_groups(scores, group, quotas), n_keep)


def even(total: int, parts: int) -> list[int]:
    """Return `parts` integers with sum `total` that differ by one at most, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]
