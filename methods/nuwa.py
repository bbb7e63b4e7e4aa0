"""Nuwa: "Mending the Spatial Integrity Torn by VLM Token Pruning" (Huang et al., ICLR 2026, arXiv 2602.02951).

Stage 1 acts on the tower's output. With a_j the attention that the class token pays patch j, and k_j its key,

    salience   paper: s_j = a_j |k_j|,    official: s_j = a_j

each square of 2 x 2 patches offers its best one, two, three or all four, the fewest that make `keep` over all squares
(the authors' one, two and three for 112, 224 and 336 of 576), and the `keep` best offers stay. They then absorb similar
patches around them. With h_j the mean of the tower's hidden states over its last third,

    W_ij = max(0, cos(h_i, h_j)) (1 - min(1, dist_ij / sqrt(reach))),    x'_i = x_i + sum_{j != i} W_ij / sum_m W_im x_j

over all patches j, m of the same image and view, kept ones too (own weight 1 is set after the rows are normalised).
Stage 2 acts halfway through the decoder (before layer 16 of 32) and keeps the tokens with the highest scores.

              pillars, which stay as they are                    scores of stage 2
    paper     kept patches with |k_i| above their 0.75 quantile  cosine of the state with the mean of the words' states
    official  kept patches with a_i above their 0.55 quantile    last prompt token's attention in the layer before,
                                                                 mean over heads

The authors keep 112 and then 16 of 576, 224 and 32, 336 and 48 (64, 128, 192 on average), and a tenth in stage 2 on
LLaVA-NeXT. So stage 2 keeps the share `second` of what stage 1 kept, and the budget sets stage 1; where stage 1 keeps
everything, nothing is merged and stage 2 alone meets the budget.

Differs: choices of ours: the text's max in W is read as min, "mean text embedding" as the states that enter the same
layer, as embeddings lie in another space; border squares of odd grids are smaller; `reach`, of 24 x 24 patches, is not
scaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Mixture, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_choices
from espalier.methods.select.cells import best_of_cells, cells
from espalier.methods.select.surroundings import above_quantile, taken_in
from espalier.methods.select.topk import indices_of, top

Salience = Literal["attention", "attention_key_norm"]
Pillars = Literal["attention", "key_norm"]
Guide = Literal["attention", "text"]


@dataclass(frozen=True)
class Nuwa(TokenReducer):
    """Keeps salient patches of every region, merges their surroundings into them, and drops more in the decoder.

    Attributes:
        layer: decoder layer before which stage 2 acts; None: half of the depth.
        second: share of what stage 1 kept that stage 2 keeps, at most.
        side: patches along the edge of a region.
        salience: what patches are ranked by in stage 1.
        guide: what tokens are ranked by in stage 2.
        pillars: what decides which kept patches take nothing in: those above the `quantile` of it.
        reach: square of the distance, in patches, at which nothing is taken in any more.
    """

    layer: int | None = None
    second: float = 1 / 7
    side: int = 2
    salience: Salience = "attention_key_norm"
    pillars: Pillars = "key_norm"
    quantile: float = 0.75
    reach: float = 280.0
    guide: Guide = "text"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.layer is None or self.layer >= 1, "layer", self.layer, "1 or more, or null")
        require(0 < self.second <= 1, "second", self.second, "a number in (0, 1]")
        require(self.side >= 1, "side", self.side, "1 or more")
        require(0 <= self.quantile <= 1, "quantile", self.quantile, "a number from 0 to 1")
        require(0 < self.reach < math.inf, "reach", self.reach, "a finite number above 0")
        require_choices(self, salience=Salience, pillars=Pillars, guide=Guide)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the tower's output and a place in the decoder."""
        layer = self.layer or max(1, depth // 2)
        return (Site("vision"), layer_site("layer", layer, depth))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return the share that each stage keeps: by default seven times as much in the first, at most all."""
        del n_sites
        return (min(1.0, share / self.second), share)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals of the stage."""
        if site.where == "layer":
            return (Need("last_attention" if self.guide == "attention" else "text_states"),)
        keyed = self.salience == "attention_key_norm" or self.pillars == "key_norm"
        names = ("cls_attention", "tower_states", *(("wide_tower_keys",) if keyed else ()))
        return tuple(map(Need, names))

    def plan(self, view: View, keep: int) -> Plan:
        """Carry out the stage of the view's site.

        Cost: stage 1 O(N log N + keep N D), and O(keep N D) for the engine's product; stage 2 O(N D + N log N).
        """
        if view.site.where == "layer":
            scores = self.relevance(view)
            return Plan(top(scores, keep), scores=scores)
        attention, norms = view.signals["cls_attention"].float(), torch.ones(())
        if "wide_tower_keys" in view.signals:
            norms = view.signals["wide_tower_keys"].float().norm(dim=-1)
        salience = attention * norms if self.salience == "attention_key_norm" else attention
        kept = best_of_cells(salience, cells(view.grid, self.side), self.side**2, keep)
        index = indices_of(kept, keep)
        if keep == kept.shape[1]:
            return Plan(index)
        height = attention if self.pillars == "attention" else norms
        pillar = above_quantile(height.gather(1, index), self.quantile)
        around = (view.signals["tower_states"], view.grid, index, pillar, self.reach**0.5)
        return Plan(index, Mixture(taken_in(*around)), scores=salience)

    def relevance(self, view: View) -> Tensor:
        """Return (B, N) the scores of stage 2."""
        if self.guide == "attention":
            return view.signals["last_attention"].float()
        # A cosine has the same order with the sum as with the mean, whatever the padding.
        words = normalize(view.signals["text_states"].float().sum(dim=1), dim=-1)
        return (normalize(view.tokens.float(), dim=-1) @ words.unsqueeze(2)).squeeze(2)
