"""GlobalCom2: "Global Compression Commander" for high-resolution images (Liu et al., AAAI 2026, arXiv 2501.05179).

Before the decoder, the global view controls how its n crops are compressed. With s_G the class token's scores of the
global view, s_L those of a crop's own, and R = keep / N,

    s_j = sum of s_G over the region of crop j,    sigma = softmax(s / tau) over the crops
    r_j = R (1 + sigma_j - 1/n)                    share that crop j keeps, 1 at most
    score = alpha s^_G + (1 - alpha) s_L           of a crop's token; s^_G is s_G resized bilinearly to the plane of all
                                                   crops, as the authors' code does it, and then cut to the crop

and the global view keeps the share R by s_G.

    paper    (scores=attention, normalise=false): the class token's attention, in the layer that the projector reads
    official (scores=logits, normalise=true):     its logits before the softmax, mean over heads, in the tower's last
             layer; s^_G and s_L have unit length in each crop, padding left out, before they are added

Attention sums to 1 over the view, so with tau = 10 all crops get nearly the same share; only logits distinguish them.

Differs: the code keeps the global view's tokens by descending score; here all stay in order. It cuts the view into
equal rectangles; here padding is gone, and regions are those of the image. Counts are exact: what a full crop cannot
take goes to the others, and fractions go by largest remainders. Several images, and frames of a video, get the same
share each; the code reads the wrong attention for several images, which is not followed.

An image of one view is that view's top `keep`; the authors define the method for cropped images only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_choices, require_finite
from espalier.methods.select.crops import Crops, Regions
from espalier.methods.select.quotas import apportion, top_of_groups

Scores = Literal["logits", "attention"]
NEED_OF = {"logits": Need("cls_logits", layer=-1), "attention": Need("cls_attention")}


@dataclass(frozen=True)
class GlobalCom2(TokenReducer):
    """Lets the global view decide how many and which tokens of each crop stay.

    Attributes:
        tau: temperature of the softmax over crops.
        alpha: weight of the global view's scores against a crop's own.
        scores: the signal of the class token.
        normalise: whether both scores are brought to unit length in each crop.
    """

    tau: float = 10.0
    alpha: float = 0.5
    scores: Scores = "logits"
    normalise: bool = True

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.tau > 0, "tau", self.tau, "a positive number")
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "a number from 0 to 1")
        require_choices(self, scores=Scores)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's scores, and the crop of each token."""
        del site
        return (NEED_OF[self.scores], Need("tile"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the best of each crop by its share. Cost: O(N log N).

        Raises:
            MethodError: the model does not stitch its crops, so that their regions are unknown.
        """
        scores = require_finite(view.signals[NEED_OF[self.scores].key].float(), "class scores")
        crops = Crops.of(view.grid, view.signals["tile"])
        regions = Regions.of(crops)
        # The global view takes its part of the image's tokens; the crops' own parts are scaled by what it saw in them.
        of_view = crops.over_image(crops.size * crops.is_overview).double()
        of_view /= crops.over_image(crops.size).clamp(min=1)
        weights = crops.weights(crops.size * self.adjustment(crops, regions, scores), of_view)
        quotas = apportion(weights, crops.size, keep)
        combined = self.combined(crops, regions, scores)
        return Plan(top_of_groups(combined, crops.index, quotas, keep), scores=combined)

    def adjustment(self, crops: Crops, regions: Regions, scores: Tensor) -> Tensor:
        """Return the table of r_j / R = 1 + sigma_j - 1/n; entries of global views are unused."""
        is_crop = (crops.size > 0) & ~crops.is_overview
        gathered = crops.sums(scores * regions.covered, regions.below)
        gathered = gathered.masked_fill(~is_crop, -torch.inf)
        highest = crops.over_image(gathered, "amax").nan_to_num(neginf=0.0)
        powers = ((gathered - highest) / self.tau).exp()
        sigma = powers / crops.over_image(powers).clamp(min=1e-30)
        return 1 + sigma - 1 / crops.over_image(is_crop.double()).clamp(min=1)

    def combined(self, crops: Crops, regions: Regions, scores: Tensor) -> Tensor:
        """Return the (B, N) scores by which tokens are kept within their crop."""
        overview_scores = regions.sampled(scores)
        if self.normalise:
            overview_scores, scores = (
                part / self._length(crops, part) for part in (overview_scores, scores)
            )
        return self.alpha * overview_scores + (1 - self.alpha) * scores

    def _length(self, crops: Crops, part: Tensor) -> Tensor:
        """Return (B, N) the length of the vector that `part` (B, N) is in each token's crop."""
        squares = crops.sums(part.square(), crops.index)
        return crops.of_token(squares).sqrt().clamp(min=1e-12).float()
