"""D2Pruner: debiased importance and structural diversity (AAAI 2026, arXiv 2512.19443).

Acts before decoder layer K on the hidden states h that leave layer K-1. Attention at shallow layers favours
places, not contents, so the attention of the last prompt token is divided by its mean over many images, place by place
(harness/tools/calibration):

    (3)  A_rel = A_ori / (A_bias + eps)                             debiased importance, eps = 1e-7
    (4)  S_sem(i, j) = cos(h_i, h_j)
    (5)  S^_sem = (S_sem - min S_sem) / (max S_sem - min S_sem)     over the whole matrix
    (6)  S_spat(i, j) = 1 if j is one of i's 8 neighbours in the grid of its tile, else 0
    (7)  S_fused = alpha S^_sem + (1 - alpha) S_spat
    (8)  i and j are adjacent if S_fused(i, j) > theta_sim

floor(r_pivot keep) pivots with the highest A_rel are kept; their neighbours leave the pool. Then the most important
token of the pool is kept and its neighbours leave, until `keep` are found; if the pool empties first, the most
important tokens not yet kept fill the rest.

Differs: the paper's main text leaves open whether pivots may be neighbours of one another: they may here, and
`pivot_exclusion=true` is the other reading. If all tokens are alike (max = min), S^_sem is 1.

A_bias has one value for each place of each view. An image in several views has a map for its global view, and one for
the plane of its stitched crops or, where a model does not stitch them, for each tile; so attention that follows from
position alone gives A_rel = 1 everywhere, whatever it pays one view against another. Maps are resized bilinearly where
an image's grid is not that of calibration, and tiles beyond the last one seen take that one's map. Calibration is done
with single images: every frame of a video, and each of several images, takes the map of the global view, so that frames
are compared by their attention as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_choices, require_finite
from espalier.methods.select.cosines import cosines
from espalier.methods.select.fused import FusedEdges
from espalier.methods.select.independent import independent_set
from espalier.methods.select.similarity import board_of
from espalier.methods.select.topk import top

EPSILON = 1e-7
#: A spread of cosines below this is rounding of fp32: such tokens count as identical.
FLAT = 1e-6
Selection = Literal["graph", "importance"]


@dataclass(frozen=True)
class D2Pruner(TokenReducer):
    """Keeps important tokens that are not similar to each other.

    Attributes:
        K: decoder layer before which tokens go: 2, and 5 for localization with LLaVA.
        alpha: weight of semantic against spatial similarity: 1 for understanding, 0.5 for localization.
        theta_sim: tokens more similar than this are adjacent.
        r_pivot: share of the kept tokens that are chosen by importance alone.
        pivot_exclusion: keep no two adjacent pivots either; the whole selection is then one independent set.
        selection: `graph`, or `importance` for the ablation without the graph (debiased importance only).
    """

    K: int = 2
    alpha: float = 1.0
    theta_sim: float = 0.8
    r_pivot: float = 0.7
    pivot_exclusion: bool = False
    selection: Selection = "graph"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.K >= 1, "K", self.K, "1 or more (the attention of layer K-1 is read)")
        for key in ("alpha", "theta_sim", "r_pivot"):
            value = getattr(self, key)
            require(0 <= value <= 1, key, value, "a number from 0 to 1")
        require_choices(self, selection=Selection)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer K."""
        return (layer_site("K", self.K, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the last prompt token's attention in layer K-1 and its calibrated mean."""
        del site
        return (Need("last_attention"), Need("prior"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep pivots and an independent set.

        Cost: O(N^2 D / 2) for the range of the similarities, then edges of the `keep` tokens only, O(keep N), and
        (1 - r_pivot) `keep` steps; where N^2 numbers do not fit the memory, edges cost O(keep N D).
        `selection=importance`: O(N log N).
        """
        scores = debiased(view.signals["last_attention"], view.signals["prior"])
        if self.selection == "importance":
            return Plan(top(scores, keep), scores=scores)
        # The small term keeps 0.7 * 10 from coming out as 6.999...
        n_pivots = 0 if self.pivot_exclusion else math.floor(self.r_pivot * keep + 1e-9)
        kept, spare = independent_set(scores, self.graph(view), keep, n_pivots)
        return Plan(kept, spare=spare, scores=scores)

    def graph(self, view: View) -> FusedEdges:
        """Return the graph of equations (4) to (8)."""
        semantic = cosines(view.tokens)
        low, high = (side[:, None, None] for side in semantic.extremes())
        spread = require_finite(high - low, "similarities")
        flat = spread < FLAT
        # Where all are identical this stretches them to 1, up to rounding.
        low, spread = torch.where(flat, low - 1, low), torch.where(flat, 1, spread)
        return FusedEdges(semantic, low, spread, board_of(view.grid), self.alpha, self.theta_sim)


def debiased(attention: Tensor, prior: Tensor) -> Tensor:
    """Return A_rel (B, N), equation (3), in fp32."""
    return attention.float() / (prior.float() + EPSILON)
