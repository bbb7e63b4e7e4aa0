"""PyramidDrop: visual redundancy reduction stage by stage (Xing et al., CVPR 2025, arXiv 2410.17247).

The decoder is cut into S stages. At the end of each but the last, the visual tokens are ranked by the attention of the
last prompt token, mean over heads, and the share lambda of them stays:

    a_j = 1/H sum_h A_h[last, j],    V_(s+1) = lambda V_s

    paper    (ranking=stage_end):  A is that of the layer that ends the stage
    official (ranking=next_layer): A is that of the layer that begins the next one, for the states that enter it

The published setting is S = 4 equal stages and lambda = 0.5, which is ratio=0.875 under budget=kept (half, a quarter,
an eighth; the released code rounds down, here halves go up); any other budget is solved for lambda.

Equal stages (before layers 8, 16, 24 of 32) average at least a quarter of the tokens, because layers 0 to 7 see all of
them; the layers by which the authors reached lower averages are not published. `ratio` lays the stages out for a share
removed on average: they end before layers l, 2l, 3l, with the largest l that needs no lambda below one half for it,
from equal stages down to l = 2. Of 32 layers, 192, 128 and 64 of 576 tokens give l = 4, 2, 2 and, by the budget,
lambda = 0.547, 0.515, 0.307. A budget that a layout cannot reach is refused with the valid range.

Differs: the released code also closes the gaps in the positions after every stage: the tokens of a stage are counted
from 0, and a new token takes the next number of each stage, as with engine.positions=method; by default positions stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from espalier.methods.base import Need, Plan, Site, View
from espalier.methods.checks import layer_site, require
from espalier.methods.select.topk import top
from espalier.methods.stages import Stages

SIGNAL_OF = {"stage_end": "last_attention", "next_layer": "next_last_attention"}
#: The first stage ends no earlier, unless an equal one is shorter.
EARLIEST = 2


@dataclass(frozen=True)
class PyramidDrop(Stages):
    """Keeps, stage by stage, the tokens that the last prompt token attends to most.

    Attributes:
        S: number of stages.
        layers: ascending decoder layers before which tokens are dropped; empty: the layers that S gives.
        ranking: the layer with the ranking attention: the last of the stage (`stage_end`) or the `next_layer`.
        ratio: share of the tokens removed, on average over the layers, that the stages are laid out for; 0: equal.
    """

    S: int = 4
    layers: tuple[int, ...] = ()
    ranking: Literal["stage_end", "next_layer"] = "stage_end"
    ratio: float = 0.0

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.S >= 2, "S", self.S, "2 or more (tokens go between stages)")
        ascending = all(a < b for a, b in pairwise((0, *self.layers)))
        require(ascending, "layers", list(self.layers), "ascending layers from 1 on, or none")
        require(self.ranking in SIGNAL_OF, "ranking", self.ranking, ", ".join(SIGNAL_OF))
        require(0 <= self.ratio < 1, "ratio", self.ratio, "0 <= ratio < 1")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites between the stages."""
        if self.layers:
            return tuple(layer_site("layers", layer, depth) for layer in self.layers)
        valid = f"2 to {depth} (the model has {depth} decoder layers)"
        require(2 <= self.S <= depth, "S", self.S, valid)
        return tuple(Site("layer", layer) for layer in self.ends(depth))

    def ends(self, depth: int) -> tuple[int, ...]:
        """Return the layers before which stages end: the latest that reach the mean with half of each stage kept."""
        equal = depth // self.S
        choices = [tuple(stage * depth // self.S for stage in range(1, self.S))]
        for first in range(equal, min(EARLIEST, equal) - 1, -1):
            choices.append(tuple(stage * first for stage in range(1, self.S)))
        for ends in choices:
            mean_share = sum(
                (b - a) / 2**stage for stage, (a, b) in enumerate(pairwise((0, *ends, depth)))
            )
            if mean_share / depth <= 1 - self.ratio + 1e-9:
                return ends
        return choices[-1]

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the last prompt token's attention in the layer before the site, or in the site's own."""
        del site
        return (Need(SIGNAL_OF[self.ranking]),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the highest. Cost: O(N log N) after one row of attention (`next_layer`: and a layer's projections)."""
        scores = view.signals[SIGNAL_OF[self.ranking]].float()
        return Plan(top(scores, keep), scores=scores)
