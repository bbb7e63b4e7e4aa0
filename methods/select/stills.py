"""Places of a video that stand still over the frames of a window, where their tokens become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.methods.plans import Assignment, Plan
from espalier.methods.select.density import density_peaks, nearest_centre, squared_distances
from espalier.methods.select.frames import Spans, clips
from espalier.methods.select.quotas import apportion
from espalier.methods.select.topk import indices_of


def windows(still: Tensor) -> Spans:
    """Return first and last frame of the windows that spare the most tokens.

    Args:
        still: (T - 1, n) whether a token is like that at its place in the next frame.
    """
    if len(still) == 0:
        return [(0, 0)]
    places = torch.stack(
        [
            pad(still[first:].long().cumprod(dim=0).sum(dim=1), (first, 0))
            for first in range(len(still))
        ]
    ).tolist()
    best, opening = [0], [0]
    for last in range(1, len(still) + 1):
        record, start = best[-1], last
        for first in range(last - 1, -1, -1):
            before = best[first - 1] if first else 0
            if before + places[first][last - 1] * (last - first) > record:
                record, start = before + places[first][last - 1] * (last - first), first
        best.append(record)
        opening.append(start)
    runs, last = [], len(still)
    while last >= 0:
        runs.append((opening[last], last))
        last = opening[last] - 1
    return runs[::-1]


def still_places(alike: Tensor, windows: Spans, tau: float, keep: int) -> Tensor:
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


def lowest(alike: Tensor, windows: Spans) -> Tensor:
    """Return (W, n) the lowest likeness over each window, from that of each frame with the next (T - 1, n)."""
    alike = pad(alike, (0, 0, 0, 1))
    return torch.stack([alike[first : max(last, first + 1)].amin(0) for first, last in windows])


def pair_mean(units: Tensor) -> Tensor:
    """Return (n,) the mean cosine of all pairs of frames at each place, from unit tokens (w, n, D); 0 of one frame."""
    n_frames = len(units)
    return (units.sum(dim=0).square().sum(dim=1) - n_frames) / max(1, n_frames * (n_frames - 1))


def parts_of(alike: Tensor, windows: Spans, tau: float, keep: int) -> list[tuple[Tensor, int]]:
    """Return tables (M, L) of tokens, and how many of `keep` each gets, in proportion to M.

    A window's still places over its L frames come first, then each frame's others (M, 1). Arguments as `still_places`.
    """
    size, parts = alike.shape[1], []
    for (first, last), is_still in zip(
        windows, still_places(alike, windows, tau, keep), strict=True
    ):
        frames = torch.arange(first, last + 1, device=alike.device) * size
        parts.append(is_still.nonzero() + frames)
        parts += [(~is_still).nonzero() + frame for frame in frames]
    sizes = torch.tensor([[len(part) for part in parts]])
    return list(zip(parts, apportion(sizes, sizes, keep)[0].tolist(), strict=True))


def clusters(values: Tensor, n_centres: int, n_near: int) -> Tensor:
    """Return (M,) the centre that each of the values (M, D) joins: itself for density peaks.

    Cost: O(M^2 (D + log M)).
    """
    squared = squared_distances(values.unsqueeze(0))
    centres = density_peaks(squared, n_centres, min(n_near, len(values)))
    return centres[0, nearest_centre(-squared, centres)[0]]


def centre_weights(joined: Tensor, beta: float) -> Tensor:
    """Return (M,) weights of values in the centre that each joins (M,): `beta` of the centre, the rest of others.

    A centre that no other value joins weighs 1.
    """
    joiners = torch.bincount(joined, minlength=len(joined)) - 1
    centre_weight = torch.where(joiners > 0, beta, 1.0)
    share = (1 - beta) / joiners.clamp(min=1)
    leads = joined == torch.arange(len(joined), device=joined.device)
    return torch.where(leads, centre_weight, share[joined])


def plan_of(into: Tensor, weight: Tensor, keep: int | None, scores: Tensor | None = None) -> Plan:
    """Return the plan by which each token goes to another (B, N), or to none (-1), with a weight (B, N).

    Tokens that go to themselves stay: `keep` of each row; None: as many as there are of the first.
    """
    stays = into == torch.arange(into.shape[1], device=into.device)
    keep = int(stays[0].sum()) if keep is None else keep
    place = (stays.cumsum(dim=1) - 1).gather(1, into.clamp(min=0))
    slot = torch.where(into < 0, -1, place)
    return Plan(indices_of(stays, keep), Assignment(slot, weight), scores=scores)


def plan_of_clips(
    grid: Tensor,
    signals: Sequence[Tensor],
    keep: int,
    of_clip: Callable[..., tuple[Tensor, Tensor]],
    scores: Tensor | None = None,
    exact: bool = True,
) -> Plan:
    """Return the plan of a method that merges each clip of the coordinates (B, N, 4) by itself.

    Args:
        grid: coordinates of the tokens.
        signals: (B, N) or (B, N, D), from which a clip's (T, n) or (T, n, D) go to `of_clip`, then its count of tokens.
        keep: tokens that stay in each row; the clips share them.
        of_clip: returns (T n) the token that each token of a clip goes to, -1 for none, and its weight there.
        scores: of the plan.
        exact: whether `of_clip` keeps that count; if not, there must be one row.
    """
    into = torch.full(grid.shape[:2], -1, device=grid.device)
    weight = torch.zeros(grid.shape[:2], device=grid.device)
    for row, spans in enumerate(clips(grid, keep)):
        for clip in spans:
            goes, share = of_clip(*(clip.of(signal[row]) for signal in signals), clip.keep)
            into[row, clip.span] = torch.where(goes < 0, -1, goes + clip.span.start)
            weight[row, clip.span] = share
    return plan_of(into, weight, keep if exact else None, scores)
