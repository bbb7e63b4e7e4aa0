"""Greedy independent set: the best-scored tokens without adjacent pairs, filled up to an exact count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from espalier.methods.select.cosines import fits
from espalier.methods.select.greedy import greedy_picks, rows_for_picks
from espalier.methods.select.topk import Chosen, filled_up, ranking, rows_of

#: Pivots with edges computed together.
TOGETHER = 96


class Graph(Protocol):
    """A symmetric graph of N tokens with edges computed on request; a token's edge to itself is ignored."""

    def rows(self, indices: Tensor) -> Tensor:
        """Return (B, K, N) booleans: the neighbours of the tokens `indices` (B, K)."""

    def row(self, pick: Tensor, merit: Tensor) -> Tensor:
        """Return (B, N) booleans: the neighbours of the tokens `pick` (B, 1), which had the highest `merit` (B, N)."""


@dataclass(frozen=True)
class Within:
    """The graph of what lies within a cutoff, as a table (B, M, M)."""

    table: Tensor

    def rows(self, indices: Tensor) -> Tensor:
        """Return (B, K, M)."""
        return self.table[rows_of(indices), indices]

    def row(self, pick: Tensor, merit: Tensor) -> Tensor:
        """Return (B, M)."""
        del merit
        if len(pick) == 1:
            return self.table[0].index_select(0, pick[0])
        return self.rows(pick).squeeze(1)


def independent_set(scores: Tensor, graph: Graph, n_keep: int, n_pivots: int = 0) -> Chosen:
    """Return n_keep tokens: pivots, then a greedy independent set, then the best other tokens.

    The `n_pivots` best tokens are kept whatever their edges, and their neighbours leave the pool. Then the best token
    of the pool is kept and its neighbours leave, again and again. If the pool empties before `n_keep` tokens are
    found, the best tokens not yet kept fill the count, with or without edges.

    Args:
        scores: (B, N), higher is better; equal scores go to the lower index.
        graph: of the same N tokens.
        n_keep: how many to keep, 1 to N.
        n_pivots: how many are kept without looking at the graph, 0 to n_keep.

    Raises:
        MethodError: a score is NaN or infinite.

    Cost: O(N log N), the edges of n_keep tokens and as many passes over N numbers, in one Python loop over blocks of
    pivots and one of n_keep - n_pivots steps.
    """
    order = ranking(scores)
    n_tokens = scores.shape[1]
    place = torch.arange(n_tokens, device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place)

    pivots = order[:, :n_pivots]
    kept = torch.zeros_like(order, dtype=torch.bool).scatter_(1, pivots, True)
    blocked = kept.clone()
    for start in range(0, n_pivots, TOGETHER):
        blocked |= graph.rows(pivots[:, start : start + TOGETHER]).any(dim=1)
    n_picks = n_keep - n_pivots
    table = graph.table if isinstance(graph, Within) and rank.is_cuda and n_picks else None
    if table is not None and fits(4 * table.numel(), table.device):
        pool = rank.float().masked_fill_(blocked, torch.inf)
        return filled_up(kept | _picked(table, pool, n_picks), order, n_keep)
    merit = (
        (n_tokens - rank).float().masked_fill_(blocked, 0)
    )  # positive for the tokens in the pool
    picks = order.new_empty(len(order), n_picks)
    best = merit.new_empty(picks.shape)
    for out in zip(best.split(1, dim=1), picks.split(1, dim=1), strict=True):
        _, pick = torch.max(merit, dim=1, keepdim=True, out=out)
        merit.masked_fill_(graph.row(pick, merit), 0)
        merit.scatter_(1, pick, 0)
    # An empty pool adds nothing.
    picked = torch.zeros_like(order).scatter_reduce_(1, picks, (best > 0).long(), "amax").bool()
    return filled_up(kept | picked, order, n_keep)


def _picked(table: Tensor, pool: Tensor, count: int) -> Tensor:
    """Return (B, N) which tokens a greedy set of at most `count` takes.

    Args:
        table: (B, N, N) neighbours.
        pool: (B, N) rank of each token, infinite outside the pool.
        count: 1 to N.
    """
    rows = rows_for_picks(pool.unsqueeze(1).where(~table, torch.inf))
    picks = greedy_picks(rows, pool, pool.argmin(dim=1), count)
    # Once the pool is empty, picks are neighbours of earlier ones, repeat them, or were never in the pool.
    among = rows[rows_of(picks), picks].take_along_dim(picks.unsqueeze(1), dim=2)
    is_late = among.isinf().tril(-1).any(dim=2) | pool.gather(1, picks).isinf()
    return torch.zeros_like(pool).scatter_add_(1, picks, (~is_late).float()) > 0
