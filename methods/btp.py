"""BTP: "Balanced Token Pruning: Accelerating VLMs Beyond Local Optimization" (NeurIPS 2025, arXiv 2505.22038).

Prunes in three stages inside the decoder: early layers keep tokens that differ, for the layers to come; late ones those
that are attended to. A stage keeps k tokens, the union of

    attention  n_A = floor(a k): of the floor(f n_A) tokens to which the last prompt token pays the most attention in
               the layer before, first those among the first k of the sequence, then the others, each by attention
    diversity  floor(d k) tokens by max-min distance 1 - cos of the hidden states, as in DivPrune
    places     floor(p k) tokens by max-min Manhattan distance in the patch grid, from the first patch on

and then, until there are k, the tokens farthest from all chosen, by the distance of diversity.

    before layer (from 0, of 32)    k       a     f     d     p
    3                               N/2     0.3   3.7   0.3   0.5
    6                               N/4     0.9   1.5   0.1   0
    14                              N/12    1     1.2   0     0

ratio=0.9167 under budget=kept is this schedule; for any other the shares are scaled, at most to 1. Read is the code in
github.com/allenhaozhu/NeurIPS2025-Balanced-Token-Pruning (commit 9682db06), a copy of the authors' for LLaVA-1.5; the
paper's text, in which stages are calibrated for each model, was not compared. The code drops
what is left before layer 22; here the last twelfth stays to the end. In its second stage a token can be chosen twice
and is then kept twice; here it counts once, and diversity adds another. Where the union is more than k, the last of the
places and then of diversity go; the code keeps them all. Its places are those of 24 x 24 patches; here of each picture,
one below the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from espalier.methods.base import MethodError, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_finite
from espalier.methods.select.cosines import Cosines, cosines
from espalier.methods.select.maxmin import farthest_first
from espalier.methods.select.similarity import board_of
from espalier.methods.select.topk import indices_of, ranking

STAGES = 3


@dataclass(frozen=True)
class BTP(TokenReducer):
    """Keeps diverse tokens in early stages and attended ones in late stages.

    Attributes:
        layers: decoder layers, from 0, before which tokens go.
        depth: decoder layers of the model that `layers` are meant for; others act at the same shares of their depth.
        schedule: tokens after each stage; only their proportions count.
        attention: share of each stage's tokens by attention, a.
        candidates: tokens that may be chosen by attention, for each that is, f.
        diversity: share by diversity, d.
        places: share by places, p.
    """

    layers: tuple[int, ...] = (3, 6, 14)
    depth: int = 32
    schedule: tuple[int, ...] = (6, 3, 1)
    attention: tuple[float, ...] = (0.3, 0.9, 1.0)
    candidates: tuple[float, ...] = (3.7, 1.5, 1.2)
    diversity: tuple[float, ...] = (0.3, 0.1, 0.0)
    places: tuple[float, ...] = (0.5, 0.0, 0.0)

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        rising = all(a < b for a, b in pairwise((0, *self.layers, self.depth)))
        valid = f"three layers in ascending order, 1 to {self.depth - 1} (method.params.depth)"
        require(rising and len(self.layers) == STAGES, "layers", self.layers, valid)
        falling = all(a >= b > 0 for a, b in pairwise((math.inf, *self.schedule)))
        valid = "three positive numbers, none larger than the one before"
        require(falling and len(self.schedule) == STAGES, "schedule", self.schedule, valid)
        for key, low, high in (
            ("attention", 0, 1),
            ("candidates", 1, math.inf),
            ("diversity", 0, 1),
            ("places", 0, 1),
        ):
            values = getattr(self, key)
            fits = len(values) == STAGES and all(low <= value <= high for value in values)
            require(fits, key, values, f"three numbers from {low} to {high}")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites before `layers`, at the same shares of the depth."""
        layers = [0]
        for layer in self.layers:
            layers.append(max(layers[-1] + 1, math.floor(layer * depth / self.depth + 0.5)))
        if layers[-1] >= depth:
            raise MethodError(
                f"method.params.layers={self.layers!r} does not fit; valid: a model of 4 layers or more, not {depth}"
            )
        return tuple(Site("layer", layer, stage) for stage, layer in enumerate(layers[1:]))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Scale the schedule until `share` is left at its end; no site keeps more than all."""
        del n_sites
        return tuple(min(1.0, share * count / self.schedule[-1]) for count in self.schedule)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the last prompt token's attention in the layer before the site."""
        del site
        return (Need("last_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the union, then fill up.

        Cost: O(N^2 D / 2) for the similarities of a stage with diversity, then at most `keep` steps of O(N), and as
        many for places; O(N log N) without either.
        """
        scores, stage = view.signals["last_attention"].float(), view.site.stage
        n_attention, n_diverse, n_places = (
            math.floor(shares[stage] * keep + 1e-9)
            for shares in (self.attention, self.diversity, self.places)
        )
        n_candidates = math.floor(self.candidates[stage] * n_attention + 1e-9)
        # 0, 1 and from 2 on by what a token is chosen; what no criterion chooses has infinity.
        reason = torch.full_like(scores, torch.inf)
        reason.scatter_(1, on_places(view.grid, n_places), 2 + place_of(reason, n_places))
        similarity = cosines(view.tokens) if n_attention < keep else None
        if similarity is not None:
            require_finite(similarity.diagonal(), "tokens")
        if similarity is not None and n_diverse:
            reason.scatter_(1, farthest_first(similarity, n_diverse), 1.0)
        reason.scatter_(1, attended(scores, keep, n_attention, n_candidates), 0.0)
        first = reason.argsort(dim=1, stable=True)[:, :keep]
        chosen = torch.zeros_like(reason, dtype=torch.bool).scatter(1, first, True)
        chosen &= reason.isfinite()
        if similarity is not None:
            chosen = filled_with_farthest(similarity, chosen, keep)
        return Plan(indices_of(chosen, keep), scores=scores)


def place_of(like: Tensor, count: int) -> Tensor:
    """Return (B, count) the numbers from 0 as floats."""
    return torch.arange(count, device=like.device, dtype=like.dtype).expand(len(like), -1)


def attended(scores: Tensor, keep: int, count: int, n_candidates: int) -> Tensor:
    """Return (B, count) indices of the best `n_candidates`, those below `keep` before the others."""
    candidates = ranking(scores)[:, :n_candidates]
    early_first = (candidates >= keep).to(torch.uint8).argsort(dim=1, stable=True)
    return candidates.gather(1, early_first)[:, :count]


def on_places(grid: Tensor, count: int) -> Tensor:
    """Return (B, count) indices by max-min Manhattan distance in the grid (B, N, 4), in the order of the choice."""
    board = board_of(grid)
    picks = torch.zeros(grid.shape[0], count, dtype=torch.long, device=grid.device)
    gap = torch.full_like(board[0], torch.iinfo(board.dtype).max)
    for step in range(count):
        pick = picks[:, step : step + 1]
        if step:
            pick.copy_(gap.argmax(dim=1, keepdim=True))
        distance = (board - board.gather(2, pick.expand(2, -1, -1))).abs().sum(dim=0)
        # A pick has distance 0 to itself, and a free token at least 1.
        torch.minimum(gap, distance.to(gap.dtype), out=gap)
    return picks


def filled_with_farthest(similarity: Cosines, chosen: Tensor, keep: int) -> Tensor:
    """Return (B, N) booleans with `keep` true: `chosen`, then one by one the token farthest from all chosen before."""
    missing = keep - chosen.sum(dim=1, keepdim=True)
    n_chosen, n_steps = torch.stack([keep - missing.min(), missing.max()]).tolist()
    if n_steps == 0:
        return chosen
    if n_chosen == 0:
        return chosen.scatter(1, farthest_first(similarity, keep), True)
    indices = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_chosen]
    rows = similarity.rows(indices).masked_fill_(~chosen.gather(1, indices).unsqueeze(2), -2)
    likeness = rows.amax(dim=1).masked_fill_(chosen, torch.inf)
    chosen = chosen.clone()
    for step in range(n_steps):
        pick = likeness.argmin(dim=1, keepdim=True)
        chosen.scatter_(1, pick, chosen.gather(1, pick) | (step < missing))
        torch.maximum(likeness, similarity.row(pick, -likeness), out=likeness)
        likeness.scatter_(1, pick, torch.inf)
    return chosen
