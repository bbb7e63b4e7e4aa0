"""IDPruner: "Harmonizing Importance and Diversity in Visual Token Pruning" (Tan et al., 2026, arXiv 2602.13315).

Acts on the projected tokens z, before the decoder. The kept set S grows by maximal marginal relevance (MMR), with w the
importance of a token:

    Imp_i = (w_i - min w) / (max w - min w + 1e-6)
    next: argmax_i  lambda Imp_i - (1 - lambda) max_{j in S} cos(z_i, z_j),    first: argmax_i Imp_i

Differs: the released code (github.com/YF-T/IDPruner, commit 6aeb9dc3, and Tencent/AngelSlim) takes w from a scorer that
its authors trained for each model (VisionSelector): the mean over j of q_i . k_j, with two trained projections of z.
These weights are no part of a model, and w is the attention that the tower's class token pays a patch here, in the
layer that the projector reads. Published scores are those of the trained scorer and do not carry over. Given the same
w, paper, code and this file choose the same tokens. Kept tokens stay in raster order, as in the code; lambda = 0.5 is
its setting in all examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_finite
from espalier.methods.select.cosines import Held, cosines, fits
from espalier.methods.select.greedy import greedy_picks, rows_for_picks

EPSILON = 1e-6


@dataclass(frozen=True)
class IDPruner(TokenReducer):
    """Keeps tokens that are important and unlike those kept before.

    Attributes:
        mmr_lambda: weight of importance against diversity; 1 is importance alone.
    """

    mmr_lambda: float = 0.5

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(0 <= self.mmr_lambda <= 1, "mmr_lambda", self.mmr_lambda, "a number from 0 to 1")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the projected tokens, before the decoder."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's attention."""
        del site
        return (Need("cls_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep by maximal marginal relevance.

        Cost: O(N^2 D / 2) for the similarities, then `keep` steps of three operations on N numbers.
        """
        weight = require_finite(view.signals["cls_attention"].float(), "class attention")
        low, high = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
        importance = (weight - low) / (high - low + EPSILON)
        similarity = cosines(view.tokens)
        require_finite(similarity.diagonal(), "tokens")
        share, merit = 1 - self.mmr_lambda, self.mmr_lambda * importance
        first = importance.argmax(dim=1)  # the first of equal ones
        matrix = similarity.matrix if isinstance(similarity, Held) else None
        # As in `farthest_first`.
        if importance.is_cuda and matrix is not None and fits(4 * matrix.numel(), matrix.device):
            # The negative of what is maximised falls with the likeness, also when rounded: its largest value is that
            # of the largest likeness.
            rows = rows_for_picks(matrix).mul_(share).sub_(merit.unsqueeze(1))
            picks = greedy_picks(rows, -share - merit, first, keep)
            return Plan(picks.sort(dim=1).values, scores=weight)
        likeness, pick = torch.full_like(importance, -1.0), first.unsqueeze(1)
        chosen = [pick]
        for _ in range(keep - 1):
            merit.scatter_(1, pick, -torch.inf)
            torch.maximum(likeness, similarity.row(pick, merit - share * likeness), out=likeness)
            pick = (merit - share * likeness).argmax(dim=1, keepdim=True)
            chosen.append(pick)
        return Plan(torch.cat(chosen, dim=1).sort(dim=1).values, scores=weight)
