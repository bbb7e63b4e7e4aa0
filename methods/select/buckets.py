"""Targets of evicted cache entries that are averaged into kept ones: Elastic Cache (arXiv 2407.18121)."""

from __future__ import annotations

import torch
from torch import Tensor


def into_nearest(scores: Tensor, kept: Tensor, share: float, shift: int = 0) -> Tensor | None:
    """Return (H, N): the nearest kept candidate of each evicted one, the earlier of two as near; itself if kept.

    The given share of the evicted ones is merged, the highest scores first; the others are dropped (-1). None: all are.

    Args:
        scores: (H, N) of the candidates.
        kept: (H, K) ascending candidates that stay.
        share: 0 to 1.
        shift: offset in measuring distance: a candidate at j counts as one at j - shift.

    Cost: O(H N log N).
    """
    n_merged = round(share * (scores.shape[-1] - kept.shape[-1]))
    if n_merged == 0:
        return None
    pairs = zip(scores, kept, strict=True)
    return torch.stack(
        [_of_head(head_scores, stay, n_merged, shift) for head_scores, stay in pairs]
    )


def _of_head(scores: Tensor, kept: Tensor, n_merged: int, shift: int) -> Tensor:
    places = torch.arange(len(scores), device=scores.device)
    near = places - shift
    after = torch.searchsorted(kept, near).clamp(max=len(kept) - 1)
    following, before = kept[after], kept[(after - 1).clamp(min=0)]
    nearest = torch.where((near - before).abs() <= (near - following).abs(), before, following)
    stays = torch.zeros_like(places, dtype=torch.bool).index_fill_(0, kept, True)
    best = scores.masked_fill(stays, float("-inf")).argsort(descending=True, stable=True)
    targets = torch.full_like(places, -1)
    targets[best[:n_merged]] = nearest[best[:n_merged]]
    return torch.where(stays, places, targets)
