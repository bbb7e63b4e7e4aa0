"""FrameFusion (Fu et al., ICCV 2025, arXiv 2501.01986): similarity and importance combined for video token reduction.

**Merging**, before decoder layers 0 to K-1. A token is compared with the one at its place in the frame before, or in
the last frame that still has one there. The pairs with

    cos(x[t, i], x[t', i]) >= S

merge, or the likest of them if that leaves no more than the budget: a run of merged tokens becomes its mean, in its
first frame. **Pruning**, before layer K: of what is left the budget's count stays, those to which the last prompt token
pays the most attention in layer K-1, mean over heads.

The count in between is the sample's own, so that S > -2 is adaptive, while the count in the end is the budget's. S = -2
merges all the way and prunes nothing.

Differs: followed is the released code (github.com/thu-nics/FrameFusion, commit fbec1d2e) with its S of 0.6, which it
sets for each model; the paper's text was not compared. The code merges before layer 0 and then, layer by layer, between
attention and feed-forward, until a merging takes less than a tenth of the tokens, and prunes at the next; two mergings
and K = 2 are the fewest it can do where the first takes more. Here each acts before a layer, on what the feed-forward
has passed. Its budget is the mean over layers, so that it prunes the more the less has merged; here the count in the
end is that of the budget's schedule. Where pairs run out it merges across places; here as well, first places first.
Several videos of a prompt count as one, and a picture as a frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, read, require, require_finite
from espalier.methods.select.similarity import unit
from espalier.methods.select.stills import plan_of
from espalier.methods.select.topk import ranking, rows_of, top


@dataclass(frozen=True)
class FrameFusion(TokenReducer):
    """Merges what is like the frame before, and then drops what the last prompt token attends to least.

    Attributes:
        S: cosine from which two tokens at one place merge; -2: the likest merge until the budget is met.
        K: decoder layer, from 0, before which tokens are pruned.
    """

    S: float = 0.6
    K: int = 2

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(-2 <= self.S <= 1, "S", self.S, "a cosine, -1 to 1, or -2")
        require(self.K >= 1, "K", self.K, "1 or more (the attention of layer K-1 is read)")

    @property
    def adaptive(self) -> bool:
        """Whether the count between merging and pruning is the sample's own."""
        return self.S > -2

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix, and the sites before layers 1 to K."""
        last = layer_site("K", self.K, depth)
        return (Site("prefix"), *(Site("layer", layer) for layer in range(1, self.K)), last)

    def needs_frames(self) -> bool:
        """Return true: frames are compared."""
        return True

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the last prompt token's attention where tokens are pruned."""
        return (Need("last_attention"),) if site.layer == self.K else ()

    def plan(self, view: View, keep: int) -> Plan:
        """Merge or prune. Cost: O(N (D + log N)); merging waits for the device twice."""
        keep = min(keep, view.tokens.shape[1])
        if view.site.layer == self.K:
            attention = view.signals["last_attention"].float()
            return Plan(top(attention, keep), scores=attention)
        tokens = require_finite(view.tokens, "tokens")
        order = by_place(view.grid)
        alike = likeness(tokens, view.grid, order)
        n_pairs = int(read((alike >= self.S).sum(dim=1).max())[0])
        n_merged = min(n_pairs, alike.shape[1] - keep)
        joins = torch.zeros_like(alike, dtype=torch.bool)
        joins.scatter_(1, ranking(alike)[:, :n_merged], True)
        run = (~joins).cumsum(dim=1) - 1
        size = torch.zeros_like(run).scatter_add(1, run, torch.ones_like(run)).gather(1, run)
        first = order[~joins].view(len(order), -1).gather(1, run)
        into = torch.zeros_like(order).scatter(1, order, first)
        weight = torch.zeros_like(alike).scatter(1, order, 1 / size.float())
        return plan_of(into, weight, alike.shape[1] - n_merged)


def by_place(grid: Tensor) -> Tensor:
    """Return (B, N) the tokens sorted by their places in a frame, and frame by frame at each place."""
    order = torch.arange(grid.shape[1], device=grid.device).expand(grid.shape[:2])
    for axis in (3, 2, 1):
        order = order.gather(1, grid[:, :, axis].gather(1, order).argsort(dim=1, stable=True))
    return order


def likeness(tokens: Tensor, grid: Tensor, order: Tensor) -> Tensor:
    """Return (B, N) the cosine of each token with the one before it in `order`; -2 for another place, -3 for none."""
    units, places = unit(tokens)[rows_of(order), order], grid[rows_of(order), order, 1:]
    alike = (units[:, 1:] * units[:, :-1]).sum(dim=2)
    alike = alike.masked_fill((places[:, 1:] != places[:, :-1]).any(dim=2), -2)
    return torch.nn.functional.pad(alike, (1, 0), value=-3)
