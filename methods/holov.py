"""HoloV: "Don't Just Chase Highlighted Tokens" (Zou et al., NeurIPS 2025, arXiv 2510.02912).

Acts on the projected tokens z, before the decoder, cut into C parts of M tokens. With S the cosines inside a part, 0 on
the diagonal, and A the class token's attention to a patch, mean over heads, in the layer that the projector reads:

    mu_i = sum_j S_ij / (M - 1),     V_i = sum_j (S_ij - mu_i)^2 / (M - 1)
    H_i  = A_i + alpha gamma V_i,    gamma = mean A / (mean V + 1e-6) over the part
    w_c  = mean of H over part c, divided by the sum of these means

The quota of part c is floor(w_c keep), and what is missing goes to the highest w. What a part is too small for goes to
others by w_c (M - quota). Each part keeps its tokens with the highest scores:

    paper    (cut=regions, ranking=holistic, alpha=1, missing=highest): scores H; one part gets all that is missing
    official (cut=runs, ranking=attention, alpha=0.09, missing=each):   scores A; each of the first gets one

Differs: the paper leaves the shape of its crops open; here they are `regions`, nearly square parts of the grid. The
released code (github.com/obananas/HoloV, commit 1d2e65e9) cuts the sequence into runs, across views and images. It has
zeros for what a part is too small for, and falling attention inside parts; here the count is exact, in raster order. An
exponent of w without a value in the paper and the refetching inside the decoder are not in the code and left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_choices, require_finite
from espalier.methods.select.groups import Groups
from espalier.methods.select.quotas import apportion, even, top_of_groups
from espalier.methods.select.similarity import cosine
from espalier.methods.select.tiles import regions
from espalier.methods.select.topk import ranking

EPSILON = 1e-6
Cut = Literal["regions", "runs"]
Ranking = Literal["holistic", "attention"]
Missing = Literal["highest", "each"]


@dataclass(frozen=True)
class HoloV(TokenReducer):
    """Distributes the budget over parts of the picture by diversity and attention, then keeps the best of each.

    Attributes:
        crops: number of parts, C.
        alpha: weight of diversity against attention.
        cut: how the tokens are cut into parts.
        ranking: what the tokens of a part are ranked by.
        missing: who gets the tokens that rounding down leaves over.
    """

    crops: int = 16
    alpha: float = 1.0
    cut: Cut = "regions"
    ranking: Ranking = "holistic"
    missing: Missing = "highest"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.crops >= 1, "crops", self.crops, "1 or more")
        require(self.alpha >= 0, "alpha", self.alpha, "0 or more")
        require_choices(self, cut=Cut, ranking=Ranking, missing=Missing)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the projected tokens, before the decoder."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's attention."""
        del site
        return (Need("cls_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the best of each part. Cost: O(N^2 D / C) for the similarities, O(N log N) for the ranking."""
        attention = require_finite(view.signals["cls_attention"].float(), "class attention")
        number = self.number(view.grid)
        groups = Groups.of(number)
        holistic = self.holistic(groups, require_finite(view.tokens, "tokens"), attention)
        mean = holistic.view_as(groups.valid).sum(dim=2) / groups.size.clamp(min=1)
        weights = mean / mean.sum(dim=1, keepdim=True).clamp(min=EPSILON**2)
        quotas = self.quotas(weights, groups.size, keep)
        scores = attention if self.ranking == "attention" else groups.tokens(holistic)
        return Plan(top_of_groups(scores, number, quotas, keep), scores=scores)

    def number(self, grid: Tensor) -> Tensor:
        """Return (B, N) the part of each token, from 0."""
        parts = min(self.crops, grid.shape[1])
        if self.cut == "regions":
            number = regions(grid, parts)[0]
            # A view too small for a part of its own joins the part before it.
            return torch.where(number < 0, number.cummax(dim=1).values, number).clamp(min=0)
        lengths, place = (torch.tensor(row) for row in (even(grid.shape[1], parts), range(parts)))
        return place.repeat_interleave(lengths).to(grid.device).expand(grid.shape[:2])

    def holistic(self, groups: Groups, tokens: Tensor, attention: Tensor) -> Tensor:
        """Return (B C, M) the scores H of the tokens of each part, 0 where a part has fewer."""
        valid = groups.valid.flatten(0, 1)
        saliency, size = groups.rows(attention), groups.size.flatten().unsqueeze(1)
        similarity = cosine(groups.rows(tokens))
        similarity.diagonal(dim1=1, dim2=2).zero_()
        pairs = (size - 1).clamp(min=1)
        mean = similarity.sum(dim=2) / pairs
        spread = (similarity - mean.unsqueeze(2)).square() * valid.unsqueeze(1)
        variance = (spread.sum(dim=2) / pairs).masked_fill(~valid | (size < 2), 0)
        # Sums in place of means: both have the same number of tokens.
        counted = size.clamp(min=1)
        gamma = saliency.sum(1, keepdim=True) / (variance.sum(1, keepdim=True) + EPSILON * counted)
        return saliency + self.alpha * gamma * variance

    def quotas(self, weights: Tensor, size: Tensor, keep: int) -> Tensor:
        """Return (B, C) how many of `keep` tokens each part gets, by its weight and at most its size."""
        quota = (weights.double() * keep + 1e-6).floor().long()  # 0.1 * 10 must not be 0.999...
        missing = keep - quota.sum(dim=1, keepdim=True)
        rank = ranking(weights).argsort(dim=1)
        extra = (rank < missing).long() if self.missing == "each" else (rank == 0) * missing
        quota = torch.minimum(quota + extra, size)
        room, surplus = size - quota, keep - quota.sum(dim=1, keepdim=True)
        return quota + apportion(weights * room, room, surplus)
