"""FEATHER: "Feather the Throttle: Revisiting Visual Token Pruning" (Endo et al., ICCV 2025, arXiv 2412.13180).

FastV's criterion favours the bottom of a picture, because rotary positions make near tokens look relevant. FEATHER
leaves them out, and prunes twice inside the decoder. With q the query of the last prompt token and k the keys of one
layer, before any rotation, and softmax over the visual tokens left:

    a_j = 1/H sum_h softmax_j(q_h . k_hj / sqrt d)
    early    keep the rho N tokens with the highest a_j, and each token in a row and a column that s divides
    late     keep of what is left the rho^2 with the highest a_j, without regard to places

Published are rho = 0.3, s = 3 and layers 8 and 16 of 32: of N tokens 0.378 N stay if chance decides what both criteria
keep, then 0.034 N, which is ratio=0.966 under budget=kept. Any other budget is solved for rho.

Differs: followed is the released code (github.com/markendo/FEATHER, commit c2a09b27), which keeps what the two criteria
together happen to keep; here the count is exact: the grid first, then the highest a_j of the others, and if the count
is below the grid's, the best of the grid. It ranks by layers 7 and 15 (from 0) on the states that enter them and drops
the tokens after these layers; here the same ranking drops them before. Shares of other depths are the same. Rows and
columns count in each crop or frame from 0; the code takes one square picture. The paper's text was not compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from espalier.methods.base import MethodError, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class Feather(TokenReducer):
    """Keeps an even grid and the tokens attended to without regard to positions, then the latter alone.

    Attributes:
        layers: two decoder layers, from 0, that rank the tokens; these go before them.
        depth: decoder layers of the model that `layers` are meant for; others act at the same shares of their depth.
        stride: rows and columns from one token of the grid to the next, s.
    """

    layers: tuple[int, ...] = (7, 15)
    depth: int = 32
    stride: int = 3

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        rising = all(a < b for a, b in pairwise((0, *self.layers, self.depth)))
        valid = f"two layers in ascending order, 1 to {self.depth - 1} (method.params.depth)"
        require(rising and len(self.layers) == 2, "layers", self.layers, valid)
        require(self.stride >= 1, "stride", self.stride, "1 or more")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites before `layers`, at the same shares of the depth."""
        layers = [0]
        for layer in self.layers:
            layers.append(max(layers[-1] + 1, math.floor((layer + 1) * depth / self.depth - 0.5)))
        if layers[-1] >= depth:
            raise MethodError(
                f"method.params.layers={self.layers!r} does not fit; valid: a model of 3 layers or more, not {depth}"
            )
        return tuple(Site("layer", layer, stage) for stage, layer in enumerate(layers[1:]))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return what both stages leave, for the rho that leaves `share` at the end."""
        del n_sites
        low, high = 0.0, 1.0
        for _ in range(60):
            rho = (low + high) / 2
            low, high = (rho, high) if rho**2 * self.early_share(rho) < share else (low, rho)
        return (max(share, self.early_share(high)), share)

    def early_share(self, rho: float) -> float:
        """Return the share of the tokens that are among the best rho or on the grid, if the two are independent."""
        return rho + (1 - rho) / self.stride**2

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the last prompt token's attention in the site's layer, without rotary positions."""
        del site
        return (Need("next_bare_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the stage's tokens. Cost: O(N log N) after a layer's projections."""
        scores = view.signals["next_bare_attention"].float()
        if view.site.stage:
            return Plan(top(scores, keep), scores=scores)
        in_row, in_column = (view.grid[:, :, 2:] % self.stride == 0).unbind(dim=2)
        # Attention is at most 1.
        return Plan(top(scores + 2 * (in_row & in_column), keep), scores=scores)
