"""HiRED: attention-guided token dropping for high-resolution images (Arif et al., AAAI 2025, arXiv 2408.10945).

Before the decoder, the budget B of an image is distributed first: its global view gets alpha B, and its crops share the
remainder in proportion to the global view's class-token attention in the tower's first layer, A(0), that falls on them.
Then every view keeps the patches with the most class-token attention in the layer that the projector reads, A(-2):

    paper    (budget=mass):    s_i = sum of A(0) over the region of crop i,       n_i = (1 - alpha) B s_i / sum s
    official (budget=stripes): s_i = how many of the (1 - alpha) N0 highest A(0) of the N0 patches of the global view
                               lie in the i-th of equal runs of its raster order

The released code cuts the flat map into runs, which are horizontal stripes and not the crops' regions.

Differs: the released code also selects before padding is cut off, so that fewer tokens remain; here padding is removed
before the method acts, regions are those of the image itself, and all counts are exact: a full view passes on what it
cannot take, and fractions go by largest remainders instead of being cut off. It puts no newline tokens after rows; here
they stay. Several images, and frames of a video, get the same share each.

An image of one view is that view's top `keep`, as the authors do for LLaVA-1.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_choices, require_finite
from espalier.methods.select.crops import Crops, Regions
from espalier.methods.select.quotas import apportion, best_of_groups, top_of_groups

BudgetBy = Literal["mass", "stripes"]
FIRST = Need("cls_attention", layer=0)


@dataclass(frozen=True)
class HiRED(TokenReducer):
    """Distributes the budget over the crops, then keeps what each crop's class token attends to most.

    Attributes:
        alpha: share of an image's budget that goes to its global view.
        budget: how the crops' shares are read off the first layer.
    """

    alpha: float = 0.5
    budget: BudgetBy = "mass"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "a number from 0 to 1")
        require_choices(self, budget=BudgetBy)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's attention in the first layer and in the projector's, and the crop of each token."""
        del site
        return (FIRST, Need("cls_attention"), Need("tile"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the best of each crop by its budget. Cost: O(N log N).

        Raises:
            MethodError: the model does not stitch its crops, so that their regions are unknown.
        """
        crops = Crops.of(view.grid, view.signals["tile"])
        importance = self.importance(crops, view.signals[FIRST.key].float())
        quotas = apportion(crops.weights(importance, self.alpha), crops.size, keep)
        scores = view.signals["cls_attention"].float()
        return Plan(top_of_groups(scores, crops.index, quotas, keep), scores=scores)

    def importance(self, crops: Crops, first: Tensor) -> Tensor:
        """Return the table of s_i from the first layer's attention (B, N)."""
        regions = Regions.of(crops)
        first = require_finite(first, "first layer's class attention")
        if self.budget == "mass":
            return crops.sums(first * regions.covered, regions.below)
        # The small term keeps (1 - 0.9) * 10 from coming out as 0.999...
        overview_limit = (crops.size * (1 - self.alpha) + 1e-9).long() * crops.is_overview
        counted = best_of_groups(first, crops.index, overview_limit) & regions.covered
        return crops.sums(counted.float(), regions.stripes())
