"""Max-min diversity: tokens far from all chosen before, by cosine, by place in the grid, or by distance."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.checks import read, require_finite
from espalier.methods.select.cosines import Cosines, Held, fits
from espalier.methods.select.greedy import greedy_picks, rows_for_picks
from espalier.methods.select.similarity import board_of
from espalier.methods.select.topk import filled_up, rows_of

#: Cosine distances below this are rounding of fp32: such tokens count as duplicates, and the lower index goes first.
DUPLICATE = 1e-6


def farthest_first(cosines: Cosines, n_keep: int) -> Tensor:
    """Return (B, n_keep) ascending indices that greedily maximise the smallest distance 1 - cos between kept tokens.

    The first pick is the token with the largest distance to its nearest other token; each next pick is the token
    farthest from all picks so far. Picks are never repeated. Equal distances go to the lower index; so do duplicates,
    although their distances to a third token may differ by the rounding of a product.

    Args:
        cosines: of N tokens.
        n_keep: how many to keep, 1 to N.

    Raises:
        MethodError: a cosine is NaN or infinite.

    Cost: `Cosines.nearest` for the first pick, then `n_keep` steps of one row and eight operations on N numbers; of a
    matrix in memory a copy, two operations a step, and one read of the device.
    """
    isolation = _distance(require_finite(cosines.nearest(), "cosines"))
    # On the host a pass over one row costs less than the rows of several picks.
    stored = cosines.matrix if isolation.is_cuda and isinstance(cosines, Held) else None
    if stored is not None and fits(4 * stored.numel(), isolation.device):
        chosen, is_repeated = _leaders(stored, isolation.argmax(dim=1), n_keep)
        if not bool(read(is_repeated)[0]):
            lowest = torch.arange(isolation.shape[1], device=isolation.device)
            return filled_up(chosen, lowest.expand_as(isolation), n_keep).kept
    pick = isolation.argmax(dim=1, keepdim=True)  # argmax returns the first of equal maxima
    gap = torch.full_like(isolation, torch.inf)
    taken = torch.zeros_like(isolation)
    picks = pick.repeat(1, n_keep)
    for step in range(n_keep):
        far = _distance(cosines.row(pick, gap)).scatter_(1, pick, DUPLICATE)
        # The pick itself, or a duplicate of it that has a lower index.
        first = (far + taken).argmin(dim=1, keepdim=True)
        picks[:, step : step + 1] = first
        taken.scatter_(1, first, torch.inf)
        torch.minimum(gap, far, out=gap).scatter_(1, first, -torch.inf)
        pick = gap.argmax(dim=1, keepdim=True)
    return picks.sort(dim=1).values


def _leaders(cosines: Tensor, first: Tensor, n_keep: int) -> tuple[Tensor, Tensor]:
    """Return (B, N) what is kept before duplicates alone are left, and () whether two picks share the first one.

    A pick has the lowest of its duplicates kept in its place, which no later distance shows: the distances of both were
    DUPLICATE. Once only duplicates of picks are left, the lowest indices follow.
    """
    # The negative of the distance.
    likeness = rows_for_picks(cosines).sub_(1).clamp_(max=-DUPLICATE)
    nothing = torch.full_like(likeness[:, 0], -torch.inf)
    picks = greedy_picks(likeness, nothing, first, n_keep)
    places = picks.unsqueeze(2)
    alike = (likeness[rows_of(picks), picks] == -DUPLICATE).scatter_(2, places, True)
    is_new = ~alike.take_along_dim(places.transpose(1, 2), dim=2).tril(-1).any(dim=2)
    leader = alike.to(torch.uint8).argmax(dim=2)
    counts = torch.zeros_like(alike[:, 0], dtype=torch.long).scatter_add_(1, leader, is_new.long())
    return counts > 0, (counts > 1).any()


def filled_with_farthest(similarity: Cosines, chosen: Tensor, keep: int) -> Tensor:
    """Return (B, N) booleans with `keep` true: `chosen`, then one by one the token farthest from all chosen before."""
    missing = keep - chosen.sum(dim=1, keepdim=True)
    n_chosen, n_steps = map(int, read(keep - missing.min(), missing.max()))
    if n_steps == 0:
        return chosen
    if n_chosen == 0:
        return chosen.scatter(1, farthest_first(similarity, keep), True)
    indices = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_chosen]
    rows = similarity.rows(indices).masked_fill_(~chosen.gather(1, indices).unsqueeze(2), -2)
    likeness = rows.amax(dim=1).masked_fill_(chosen, torch.inf)
    picks = indices.new_empty(len(chosen), n_steps)
    for pick in picks.split(1, dim=1):
        torch.argmin(likeness, dim=1, keepdim=True, out=pick)
        torch.maximum(likeness, similarity.row(pick, -likeness), out=likeness)
        likeness.scatter_(1, pick, torch.inf)
    is_missing = torch.arange(n_steps, device=picks.device) < missing
    # A row that misses fewer may run out of tokens, and repeat picks.
    return chosen.long().scatter_add(1, picks, is_missing.long()) > 0


def farthest_places(grid: Tensor, count: int) -> Tensor:
    """Return (B, count) indices by max-min Manhattan distance in the grid (B, N, 4), in the order of the choice."""
    board = board_of(grid)
    picks = torch.zeros(grid.shape[0], count, dtype=torch.long, device=grid.device)
    if grid.is_cuda and count and fits(4 * board[0].numel() * grid.shape[1], grid.device):
        # On the host a pass over one row costs less than the rows of several picks.
        places = board.permute(1, 2, 0).float()
        nothing = torch.full_like(places[:, :, 0], -torch.inf)
        table = rows_for_picks(torch.cdist(places, places, p=1).neg_())
        return greedy_picks(table, nothing, picks[:, 0], count)
    gap = torch.full_like(board[0], torch.iinfo(board.dtype).max)
    for step in range(count):
        pick = picks[:, step : step + 1]
        if step:
            pick.copy_(gap.argmax(dim=1, keepdim=True))
        distance = (board - board.gather(2, pick.expand(2, -1, -1))).abs().sum(dim=0)
        # A pick has distance 0 to itself, and a free token at least 1.
        torch.minimum(gap, distance.to(gap.dtype), out=gap)
    return picks


def longest_then_farthest(keys: Tensor, count: int) -> Tensor:
    """Return (B, count) indices of (B, N, D) keys: the longest in the 1-norm, then the farthest from all before."""
    picks = keys.abs().sum(dim=2).argmax(dim=1, keepdim=True)
    gap = torch.full_like(keys[:, :, 0], torch.inf)
    for _ in range(count - 1):
        last = keys[rows_of(picks), picks[:, -1:]]
        torch.minimum(gap, (keys - last).square().sum(dim=2), out=gap)
        gap.scatter_(1, picks[:, -1:], -torch.inf)
        picks = torch.cat([picks, gap.argmax(dim=1, keepdim=True)], dim=1)
    return picks


def _distance(cosine: Tensor) -> Tensor:
    """Return 1 - cos, at least DUPLICATE, which all duplicates share."""
    return torch.rsub(cosine, 1).clamp_(min=DUPLICATE)
