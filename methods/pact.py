"""PACT: "Pruning and Clustering-Based Token Reduction" (Dhouib et al., CVPR 2025, arXiv 2504.08966).

Before decoder layer L, with its own queries q and keys k, two steps:

    pruning     the share p of the tokens stays, or as many as the budget if that is more, with the highest
                |x_i| mean_h softmax_i(mean_j q_j . k_i / sqrt(d)), without rotary positions
    clustering  of those, by d_ij = 1 - cos(k_i, k_j), with rotary positions, heads side by side (DBDPC): in the order
                of falling density sum_j exp(-(d_ij / 2)^2), each that is farther than d_c from every centre so far
                becomes one

i and j of pruning run over all tokens up to the last visual one. Every visual token, pruned or not, goes to its
nearest centre if that is not farther than 1.5 d_c, else it is dropped; a centre becomes the mean of what came to it.

d_c sets the number of centres. Here it is solved for the budget (null), by bisection: a hundredth that makes as many or
more, where the one above makes fewer; the densest of them stay. For a d_c that makes fewer, the densest others join.

Differs: followed is the released code (github.com/orailix/PACT, commit cf9a0c9f) with its settings d_c 0.21, p 0.55 and
L 4; the paper's text was not compared. The code adds the logarithm of a cluster's size to the attention it gets in all
layers from L on, which cannot be done here, and has a switch to leave that out. It keeps equal scores and densities in
no fixed order; here the lower index comes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Assignment, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_finite
from espalier.methods.select.independent import Within, independent_set
from espalier.methods.select.merge import slot_sizes
from espalier.methods.select.similarity import cosine_of_units, unit
from espalier.methods.select.topk import Chosen, rows_of, top


@dataclass(frozen=True)
class PACT(TokenReducer):
    """Prunes what the mean query does not attend to, and merges the rest around dense, distant keys.

    Attributes:
        L: decoder layer, from 0, before which tokens go.
        keep: share of the tokens that pruning leaves, p.
        cutoff: distance up to which a token cannot be a centre beside another, d_c; null: solved for the budget.
        coef_pruned: cutoffs up to which tokens merge.
    """

    L: int = 4
    keep: float = 0.55
    cutoff: float | None = None
    coef_pruned: float = 1.5

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.L >= 1, "L", self.L, "1 or more")
        require(0 <= self.keep <= 1, "keep", self.keep, "0 to 1")
        valid = "a distance, 0 to 2, or null"
        require(self.cutoff is None or 0 <= self.cutoff <= 2, "cutoff", self.cutoff, valid)
        require(self.coef_pruned >= 0, "coef_pruned", self.coef_pruned, "0 or more")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer L."""
        return (layer_site("L", self.L, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the attention of the mean query and the keys in layer L."""
        del site
        return (Need("next_mean_attention"), Need("next_visual_keys"))

    def plan(self, view: View, keep: int) -> Plan:
        """Prune, cluster and merge.

        Cost: O(M^2 D / 2) for the distances of the M tokens left, and `keep` steps of O(M) for each of up to 9 cutoffs;
        O(keep N D) for the merging.
        """
        tokens = require_finite(view.tokens.float(), "tokens")
        attention = require_finite(view.signals["next_mean_attention"].float(), "attention")
        keys = require_finite(view.signals["next_visual_keys"].float(), "keys")
        units, scores = unit(keys.transpose(1, 2).flatten(2)), attention * tokens.norm(dim=2)
        n_left = max(keep, math.floor(self.keep * scores.shape[1] + 1e-9))
        survivors = top(scores, n_left)
        distance = 1 - cosine_of_units(units[rows_of(survivors), survivors])
        centres, cutoff = self.centres(distance, keep)
        kept = survivors.gather(1, centres)
        alike, slot = (units @ units[rows_of(kept), kept].transpose(1, 2)).max(dim=2)
        slot = torch.where(1 - alike <= self.coef_pruned * cutoff, slot, -1)
        slot.scatter_(1, kept, torch.arange(keep, device=kept.device).expand_as(kept))
        weight = 1 / slot_sizes(slot).clamp(min=1)
        return Plan(kept, Assignment(slot, weight), scores=scores)

    def centres(self, distance: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Return (B, keep) ascending centres by distances (B, M, M), and (B, 1) the cutoffs."""
        density = torch.exp(-((distance / 2) ** 2)).sum(dim=2)

        def within(cutoff: Tensor) -> Chosen:
            return independent_set(density, Within(distance <= cutoff.unsqueeze(2)), keep)

        if self.cutoff is not None:
            cutoff = density.new_full((len(density), 1), self.cutoff)
            return within(cutoff).kept, cutoff
        low = torch.zeros(len(density), 1, dtype=torch.long, device=density.device)
        high = low + 201
        for _ in range(8):
            middle = (low + high) // 2
            enough = (within(middle / 100).spare <= 0).unsqueeze(1)
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return within(low / 100).kept, low / 100
