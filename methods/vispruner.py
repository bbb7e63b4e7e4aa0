"""VisPruner: "Beyond Text-Visual Attention: Exploiting Visual Cues" (Zhang et al., ICCV 2025, arXiv 2412.01818).

Acts on the tower's output x, before the projector, on every crop with its share T of the budget. Important tokens are
the floor(r T) patches to which the class token pays the most attention, mean over heads, in the layer that the
projector reads. The others, by falling attention, lose their duplicates step by step, until T - floor(r T) diverse
tokens are left: of R tokens, those at even places are set A and those at odd places set B, and the

    min(8, R - diverse) tokens a of A with the highest max_{b in B} cos(x_a, x_b)

go. What is left of A, by falling similarity, and then B are the next step's order.

Differs: followed is the released code (github.com/Theia-4869/VisPruner, commit aefa01ad); the equations of the paper's
text were not compared with it. The code fails where R is odd, which published settings avoid; here A then has one token
more. It counts padding of high-resolution crops as tokens and cuts it off afterwards; here a crop's share refers to its
tokens in the prompt, and shares that are not whole numbers go by largest remainders. Tokens keep raster order, as in
the code. Its picks are not reproducible across machines on a random picture: similarities that differ in the last bit
swap places in an order, and every later step follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import read, require, require_finite
from espalier.methods.select.cosines import Cosines, cosines
from espalier.methods.select.crops import Crops
from espalier.methods.select.groups import Groups
from espalier.methods.select.nearest import Nearest
from espalier.methods.select.quotas import apportion
from espalier.methods.select.topk import ranking

#: Tokens that a step removes at most.
STEP = 8


@dataclass(frozen=True)
class VisPruner(TokenReducer):
    """Keeps the patches that the class token attends to most, and of the others those without duplicates.

    Attributes:
        important_ratio: share of the kept tokens that are chosen by attention, r.
    """

    important_ratio: float = 0.5

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        share = self.important_ratio
        require(0 <= share <= 1, "important_ratio", share, "a number from 0 to 1")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the tower's output: features are compared, and nothing is merged."""
        del depth
        return (Site("vision"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's attention, and the crop of each token."""
        del site
        return (Need("cls_attention"), Need("tile"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep important and diverse tokens of each crop.

        Cost: O(M^2 D / 2) for the cosines of a crop's M tokens (O(4/3 M^2 D) beyond the memory), O(M^2) for
        the nearest of each, anew whenever half are left, then (M - T) / 8 steps of O(M log M) with three device
        synchronisations at most. 1.5 of X X^T at 576 tokens, 1.0 at 2,880, 1.5 to 1.9 at 25,088.
        """
        attention = require_finite(view.signals["cls_attention"].float(), "class attention")
        crops = Crops.of(view.grid, view.signals["tile"])
        groups = Groups.of(crops.index)
        quotas = apportion(crops.size, crops.size, keep)[:, : groups.size.shape[1]].flatten()
        scores = groups.rows(attention).masked_fill(~groups.valid.flatten(0, 1), -1.0)
        order = ranking(scores)
        # The small term keeps 0.7 * 10 from coming out as 6.999...
        important = (quotas * self.important_ratio + 1e-9).long()
        place = torch.arange(order.shape[1], device=order.device)
        after = (place - important.unsqueeze(1)).remainder(order.shape[1]).argsort(dim=1)
        similarity = cosines(groups.rows(require_finite(view.tokens, "tokens")))
        ordered = order.gather(1, after)
        diverse = _without_duplicates(
            ordered, groups.size.flatten() - important, quotas - important, similarity
        )
        chosen = torch.zeros_like(diverse).scatter(1, order, place < important.unsqueeze(1))
        return Plan(groups.kept(chosen | diverse, keep), scores=attention)


def _without_duplicates(
    order: Tensor, count: Tensor, target: Tensor, similarity: Cosines
) -> Tensor:
    """Return (R, M) booleans: the `target` (R,) tokens that the steps leave of the first `count` (R,) of an order."""
    marks = torch.zeros_like(order, dtype=torch.bool)
    nearest = Nearest(similarity)
    token_indices = torch.arange(order.shape[1], device=order.device).expand_as(order)
    count = torch.where(target > 0, count, 0)
    while True:
        excess, width = map(int, read((count - target).max(), count.max()))
        order = order[:, :width]
        exists = torch.arange(width, device=order.device) < count.unsqueeze(1)
        if excess <= 0:
            return marks.scatter(1, token_indices.gather(1, order), exists)
        if Nearest.many <= token_indices.shape[1] >= 2 * width:  # few listed tokens are left
            token_indices, similarity = token_indices.gather(1, order), similarity.subset(order)
            nearest = Nearest(similarity)
            order = torch.arange(width, device=order.device).expand_as(order)
        first, second = order[:, ::2], order[:, 1::2]
        absent = torch.zeros_like(token_indices, dtype=torch.bool)
        partners = absent.scatter(1, second, exists[:, 1::2])
        likeness = nearest.among(partners, first, exists[:, ::2])
        likeness = likeness.masked_fill(~exists[:, ::2], -torch.inf)
        by_likeness = likeness.argsort(dim=1, descending=True, stable=True)
        removed = (count - target).clamp(0, STEP).minimum((count + 1) // 2)
        rank = torch.arange(first.shape[1], device=order.device)
        stays = (rank >= removed.unsqueeze(1)) & exists[:, ::2]
        # What stays of A by its rank, then B, then what goes.
        joined = torch.cat([first.gather(1, by_likeness), second], dim=1)
        remaining = torch.cat([stays, exists[:, 1::2]], dim=1)
        order = joined.gather(1, (~remaining).to(torch.uint8).argsort(dim=1, stable=True))
        count = count - removed
