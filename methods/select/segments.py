"""Cuts of a video into segments of adjacent frames."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.checks import require_finite
from espalier.methods.select.frames import Spans

#: Label of frames that lost their cluster.
GAP = -1


def segments_of(labels: list[int]) -> Spans:
    """Return first and last frame of each segment, from the cluster of each frame."""
    runs = [(label, len(list(group))) for label, group in groupby(labels)]
    longest = {label: max(n for name, n in runs if name == label) for label, _ in runs}
    frames = [label if 1 < n == longest[label] else GAP for label, n in runs for _ in range(n)]
    while GAP in frames and len(set(frames)) > 1:
        runs = [(label, len(list(group))) for label, group in groupby(frames)]
        gap = [label for label, _ in runs].index(GAP)
        sides = [runs[place] for place in (gap - 1, gap + 1) if 0 <= place < len(runs)]
        runs[gap] = (max(sides, key=lambda run: run[1])[0], runs[gap][1])
        frames = [label for label, n in runs for _ in range(n)]
    ends, end = [], -1
    for _, group in groupby(frames):
        start, end = end + 1, end + len(list(group))
        ends.append((start, end))
    return ends


def segments_by_likeness(
    tokens: Tensor, sizes: Tensor, place: Tensor, fewest: int, tau: float
) -> Spans:
    """Return first and last frame of each segment, cut where adjacent frames differ most.

    Cut is at the `fewest` - 1 lowest cosines of adjacent frames' mean tokens, at each one below `tau`, and between two
    videos.

    Args:
        tokens: (N, D) of one sample.
        sizes: (F,) tokens of each frame.
        place: number of each frame in its video, for the F frames at least.
        fewest: segments, at least.
        tau: least cosine within a segment.

    Raises:
        MethodError: a token is NaN or infinite.
    """
    frame = torch.arange(len(sizes), device=tokens.device).repeat_interleave(sizes)
    sums = tokens.new_zeros(len(sizes), tokens.shape[1]).index_add(0, frame, tokens)
    means = require_finite(sums / sizes.unsqueeze(1), "tokens")
    alike = cosine_similarity(means[:-1], means[1:], dim=1)
    cuts = (alike < tau) | (place[1 : len(sizes)] == 0)
    cuts[alike.argsort(stable=True)[: fewest - 1]] = True
    starts = [0, *(cuts.nonzero()[:, 0] + 1).tolist(), len(sizes)]
    return [(start, end - 1) for start, end in pairwise(starts)]
