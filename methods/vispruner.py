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
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import read, require, require_finite
from espalier.methods.select.cosines import Held, cosines
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

        Cost: O(M^2 D / 2) for the cosines of a crop's M tokens (O(4/3 M^2 D) beyond the memory), then (M - T) / 8
        steps: below 1,024 tokens of O(M^2 / 2) without a device synchronisation, else of O(M log M) with two at
        most, and O(M^2) for the nearest of each, anew whenever half are left. Crops in a row with equal sizes and
        shares are one batch. 1.1 of X X^T at 576 and at 2,880 tokens.
        """
        attention = require_finite(view.signals["cls_attention"].float(), "class attention")
        crops = Crops.of(view.grid, view.signals["tile"])
        groups = Groups.of(crops.index)
        quotas = apportion(crops.size, crops.size, keep)[:, : groups.size.shape[1]].flatten()
        scores = groups.rows(attention).masked_fill(~groups.valid.flatten(0, 1), -1.0)
        order = ranking(scores)
        tokens = groups.rows(require_finite(view.tokens, "tokens"))
        chosen = torch.zeros_like(order, dtype=torch.bool)
        shapes = zip(*(side.tolist() for side in read(groups.size.flatten(), quotas)), strict=True)
        end = 0
        for (size, quota), alike in groupby(shapes):
            start, end = end, end + len(list(alike))
            # The small term keeps 0.7 * 10 from coming out as 6.999...
            n_important = int(quota * self.important_ratio + 1e-9)
            important, candidates = order[start:end, :size].tensor_split([n_important], dim=1)
            diverse = _without_duplicates(candidates, quota - n_important, tokens[start:end])
            chosen[start:end].scatter_(1, torch.cat([important, diverse], dim=1), True)
        return Plan(groups.kept(chosen, keep), scores=attention)


def _without_duplicates(order: Tensor, target: int, tokens: Tensor) -> Tensor:
    """Return (R, `target`) the indices that the steps leave of an order (R, K) of the tokens (R, M, D)."""
    if target in (0, order.shape[1]):
        return order[:, :target]
    similarity = cosines(tokens)
    on_host = tokens.device.type == "cpu"
    # On so few tokens a call of numpy costs less than one of torch.
    if isinstance(similarity, Held) and tokens.shape[1] < Nearest.many and on_host:
        rows = zip(order.numpy(), similarity.matrix.numpy(), strict=True)
        return torch.from_numpy(np.stack([_thinned(row, target, matrix) for row, matrix in rows]))
    nearest = Nearest(similarity)
    token_indices = torch.arange(tokens.shape[1], device=order.device).expand(tokens.shape[:2])
    while (width := order.shape[1]) > target:
        if Nearest.many <= token_indices.shape[1] >= 2 * width:  # few listed tokens are left
            token_indices, similarity = token_indices.gather(1, order), similarity.subset(order)
            nearest = Nearest(similarity)
            order = torch.arange(width, device=order.device).expand_as(order)
        first, second = order[:, ::2], order[:, 1::2]
        by_likeness = nearest.among(second, first).argsort(dim=1, descending=True, stable=True)
        staying = by_likeness[:, min(STEP, width - target) :]
        order = torch.cat([first.gather(1, staying), second], dim=1)
    return token_indices.gather(1, order)


def _thinned(order: np.ndarray, target: int, similarity: np.ndarray) -> np.ndarray:
    """Return the `target` indices that the steps leave of an order (K,), by similarities (M, M)."""
    while (width := len(order)) > target:
        first, second = order[::2], order[1::2]
        likeness = similarity[second].max(axis=0)[first]
        staying = np.argsort(-likeness, kind="stable")[min(STEP, width - target) :]
        order = np.concatenate([first[staying], second])
    return order
