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

ratio=0.9167 under budget=kept is this schedule; for any other the shares are scaled, at most to 1.

Differs: followed is the code in github.com/allenhaozhu/NeurIPS2025-Balanced-Token-Pruning (commit 9682db06), a copy of
the authors' for LLaVA-1.5; the paper's text, in which stages are calibrated for each model, was not compared. The code
drops what is left before layer 22; here the last twelfth stays to the end. In its second stage a token can be chosen
twice and is then kept twice; here it counts once, and diversity adds another. Where the union is more than k, the last
of the places and then of diversity go; the code keeps them all. Its places are those of 24 x 24 patches; here of each
picture, one below the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, View
from espalier.methods.checks import require, require_finite
from espalier.methods.scheduled import Scheduled
from espalier.methods.select.cosines import cosines
from espalier.methods.select.maxmin import farthest_first, farthest_places, filled_with_farthest
from espalier.methods.select.topk import indices_of, ranking


@dataclass(frozen=True)
class BTP(Scheduled):
    """Keeps diverse tokens in early stages and attended ones in late stages.

    Attributes:
        layers: decoder layers, from 0, before which tokens go, one for each stage.
        depth: decoder layers of the model that `layers` are meant for; others act at the same shares of their depth.
        schedule: tokens after each stage; only their proportions count.
        attention: share of each stage's tokens by attention, a.
        candidates: tokens that may be chosen by attention, for each that is, f.
        diversity: share by diversity, d.
        places: share by places, p.
    """

    layers: tuple[int, ...] = (3, 6, 14)
    schedule: tuple[int, ...] = (6, 3, 1)
    attention: tuple[float, ...] = (0.3, 0.9, 1.0)
    candidates: tuple[float, ...] = (3.7, 1.5, 1.2)
    diversity: tuple[float, ...] = (0.3, 0.1, 0.0)
    places: tuple[float, ...] = (0.5, 0.0, 0.0)

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        for key in ("attention", "candidates", "diversity", "places"):
            low, high = (1, math.inf) if key == "candidates" else (0, 1)
            values = getattr(self, key)
            fits = len(values) == len(self.layers) and all(low <= value <= high for value in values)
            valid = f"{len(self.layers)} numbers from {low} to {high}, one for each of layers"
            require(fits, key, values, valid)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites before `layers`, at the same shares of the depth."""
        layers = self.layers_of(depth)
        return tuple(Site("layer", layer, stage) for stage, layer in enumerate(layers))

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
        by_place = torch.arange(n_places, device=scores.device) + 2.0
        by_place = by_place.expand(len(scores), -1)
        reason.scatter_(1, farthest_places(view.grid, n_places), by_place)
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


def attended(scores: Tensor, keep: int, count: int, n_candidates: int) -> Tensor:
    """Return (B, count) indices of the best `n_candidates`, those below `keep` before the others."""
    candidates = ranking(scores)[:, :n_candidates]
    early_first = (candidates >= keep).to(torch.uint8).argsort(dim=1, stable=True)
    return candidates.gather(1, early_first)[:, :count]
