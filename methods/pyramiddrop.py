"""PyramidDrop: visual redundancy reduction stage by stage (Xing et al., CVPR 2025, arXiv 2410.17247).

The decoder is cut into S stages. At the end of each but the last, the visual tokens are ranked by the attention that
the last prompt token pays them there, mean over heads, and the share lambda of them stays:

    a_j = 1/H sum_h A_h[last, j],    V_(s+1) = lambda V_s

The published setting is S = 4 and lambda = 0.5, which is ratio=0.875 under budget=kept (half, a quarter, an eighth);
any other budget is solved for lambda. Stages are equally long, as in the paper (layers 8, 16, 24 of 32). Low averages
need earlier layers (layers 0 to 7 alone are a quarter of 32), which the authors used and did not publish: `layers`
sets them.

The paper ranks with the queries and keys at the end of a stage, which is what happens here: the attention of the layer
before the site. The released code takes those of the first layer of the next stage, before it runs, and closes the gaps
in the positions after every stage. Neither is offered: a site is asked before its layer has queries, and positions
inside the decoder stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from methods.base import Need, Plan, Site, TokenReducer, View
from methods.checks import layer_site, require
from methods.select.ranking import top


@dataclass(frozen=True)
class PyramidDrop(TokenReducer):
    """Keeps, stage by stage, the tokens that the last prompt token looks at.

    Attributes:
        S: stages of equal length.
        layers: decoder layers before which tokens go, ascending, instead of those that S gives; empty: those.
    """

    S: int = 4
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.S >= 2, "S", self.S, "2 or more (tokens go between stages)")
        ascending = all(a < b for a, b in pairwise((0, *self.layers)))
        require(ascending, "layers", list(self.layers), "ascending layers from 1 on, or none")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites between the stages."""
        if self.layers:
            return tuple(layer_site("layers", layer, depth) for layer in self.layers)
        valid = f"2 to {depth} (the model has {depth} decoder layers)"
        require(2 <= self.S <= depth, "S", self.S, valid)
        return tuple(Site("layer", stage * depth // self.S) for stage in range(1, self.S))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return lambda, lambda^2 and so on, where `share` is what the last stage sees."""
        return tuple(share ** (stage / n_sites) for stage in range(1, n_sites + 1))

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the last prompt token's attention in the layer before the site."""
        del site
        return (Need("last_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the highest. Cost: O(N log N) after one row of attention."""
        return Plan(top(view.signals["last_attention"].float(), keep))
