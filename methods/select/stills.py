"""Places of a video that stand still over the frames of a window, where their tokens become one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.methods.plans import Assignment, Plan
from espalier.methods.select.density import density_peaks, nearest_centre, squared_distances
from espalier.methods.select.topk import indices_of

#: First and last frame of each window of a video, in order.
Windows = Sequence[tuple[int, int]]


def still_places(alike: Tensor, windows: Windows, tau: float, keep: int) -> Tensor:
    """Return (W, n) booleans: the places above `tau`; the least similar move again until `keep` tokens are left.

    Args:
        alike: (W, n) how alike the tokens at a place are over a window; ignored in windows of one frame.
        windows: of the video.
        tau: likeness above which a place stands still.
        keep: tokens that must be left, at most those of the video. A still place of L frames leaves one of L tokens.
    """
    spared = torch.tensor([last - first for first, last in windows], device=alike.device)
    still = (alike > tau) & (spared > 0).unsqueeze(1)
    gains = (still * spared.unsqueeze(1)).flatten()
    order = alike.masked_fill(~still, torch.inf).flatten().argsort(stable=True)
    missing = keep - (int(spared.sum()) + len(windows)) * alike.shape[1] + gains.sum()
    before = gains[order].cumsum(dim=0) - gains[order]
    moves = torch.zeros_like(still.flatten()).scatter(0, order, before < missing)
    return still & ~moves.view_as(still)


def parts_of(still: Tensor, windows: Windows) -> list[Tensor]:
    """Return tables (M, L) of tokens: a window's still places over its L frames, then each frame's others (M, 1)."""
    size = still.shape[1]
    parts = []
    for (first, last), stands in zip(windows, still, strict=True):
        frames = torch.arange(first, last + 1, device=still.device) * size
        parts.append(stands.nonzero() + frames)
        parts += [(~stands).nonzero() + frame for frame in frames]
    return parts


def clusters(values: Tensor, n_centres: int, n_near: int) -> Tensor:
    """Return (M,) the centre that each of the values (M, D) joins: itself for density peaks.

    Cost: O(M^2 (D + log M)).
    """
    squared = squared_distances(values.unsqueeze(0))
    centres = density_peaks(squared, n_centres, min(n_near, len(values)))
    return centres[0, nearest_centre(-squared, centres)[0]]


def plan_of(into: Tensor, weight: Tensor, keep: int, scores: Tensor | None = None) -> Plan:
    """Return the plan by which each token goes to another (B, N), or to none (-1), with a weight (B, N).

    Tokens that go to themselves stay: `keep` of each row.
    """
    stays = into == torch.arange(into.shape[1], device=into.device)
    place = (stays.cumsum(dim=1) - 1).gather(1, into.clamp(min=0))
    slot = torch.where(into < 0, -1, place)
    return Plan(indices_of(stays, keep), Assignment(slot, weight), scores=scores)
