"""Anchors of a segment of frames, dense tokens that take in the others: FastVID (arXiv 2503.11187)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from espalier.methods.select.density import density_peaks, squared_distances
from espalier.methods.select.quotas import apportion, even

#: Neighbours of a token's density.
NEAR = 4


def salient_and_anchors(
    sizes: Sequence[int], total: int, share: float, step: int
) -> tuple[Tensor, Tensor]:
    """Return (m,) how many tokens each frame of a segment keeps by attention, and (m,) how many anchors it has.

    Args:
        sizes: tokens of each frame.
        total: tokens that the segment keeps.
        share: share of anchors among them; anchors that a frame has no tokens left for become tokens of attention.
        step: frames from one frame with anchors to the next, counted back from the last.
    """
    # The small term keeps 0.3 * 10 from becoming 2.999...
    n_anchors, m = math.floor(share * total + 1e-9), len(sizes)
    salient = torch.tensor(even(total - n_anchors, m)).minimum(torch.tensor(sizes))
    anchors, frames = torch.zeros_like(salient), range(m - 1, -1, -step)
    anchors[list(frames)] = torch.tensor(even(n_anchors, len(frames)))
    room = torch.tensor(sizes) - salient
    anchors = anchors.minimum(room)
    room = (room - anchors).unsqueeze(0)
    missing = total - int((salient + anchors).sum())
    return salient + apportion(room, room, missing)[0], anchors


def anchors_among(tokens: Tensor, free: Tensor, count: int) -> Tensor:
    """Return (count,) density peaks among the free tokens (n,) of one frame (n, D). Cost: O(n^2 D)."""
    index = free.nonzero()[:, 0]
    squared = squared_distances(tokens[index].unsqueeze(0))
    return index[density_peaks(squared, count, min(NEAR, len(index)))[0]]


def taking_in(
    tokens: Tensor, stays: Tensor, sizes: Sequence[int], anchors: Sequence[int], beta: float
) -> tuple[Tensor, Tensor]:
    """Return (K,) kept tokens of a segment, ascending, and (K, M) their mixture of its tokens (M, D).

    Args:
        tokens: of the segment.
        stays: (M,) those that stay as they are.
        sizes: tokens of each frame.
        anchors: of each frame. In every frame with anchors, each token of the segment that neither stays nor is one of
            them joins the one with the highest cosine.
        beta: least weight of an anchor in the mean of itself and of those that joined it.

    Cost: O(K M D), and O(n^2 D) for each frame with anchors, of n tokens.
    """
    spans = pairwise((0, *accumulate(sizes)))
    groups = [
        start + anchors_among(tokens[start:end], ~stays[start:end], count)
        for (start, end), count in zip(spans, anchors, strict=True)
        if count
    ]
    kept = torch.cat([stays.nonzero()[:, 0], *groups]).sort().values
    matrix = one_hot(kept, len(tokens)).float()
    units = normalize(tokens, dim=1)
    for group in groups:
        joins = (~stays).index_fill(0, group, False).nonzero()[:, 0]
        member = one_hot((units[joins] @ units[group].T).argmax(dim=1), len(group)).float()
        number = member.sum(dim=0)
        weight = (1 / (number + 1)).clamp(min=beta)
        row = torch.searchsorted(kept, group)
        share = (1 - weight) / number.clamp(min=1)
        matrix[row.unsqueeze(1), joins] = (member * share).T
        matrix[row, group] = torch.where(number > 0, weight, 1)
    return kept, matrix
