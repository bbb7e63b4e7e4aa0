"""SCOPE: saliency-coverage oriented token pruning (Deng et al., NeurIPS 2025, arXiv 2510.24214).

Acts on the tower's output x, before the projector, on every crop with its share of the budget. A set S of patches
covers patch u by its nearest member, or not at all, and the next kept patch v brings the most coverage times saliency:

    C(u, S) = max(0, max_{s in S} cos(x_u, x_s)),    gain(v, S) = sum_u max(0, cos(x_u, x_v) - C(u, S))
    S <- S + argmax_v gain(v, S) a_v^alpha

with a the attention that the class token pays a patch in the layer that the projector reads, and alpha = 1.

Differs: followed is the released code (github.com/kinredon/SCOPE, commit 6bf73069); the equations of the paper's text
were not compared with it. The code sums attention over heads and this file takes the mean, which changes no choice. It
counts padding of high-resolution crops as tokens; here a crop's share refers to its tokens in the prompt, and shares
that are not whole numbers go by largest remainders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import read, require, require_finite
from espalier.methods.select.cosines import Held
from espalier.methods.select.crops import Crops
from espalier.methods.select.groups import Groups
from espalier.methods.select.quotas import apportion
from espalier.methods.select.similarity import cosine

#: Patches with merits computed at a time.
PANEL = 32


@dataclass(frozen=True)
class SCOPE(TokenReducer):
    """Keeps salient patches that are like many patches which no kept patch is like.

    Attributes:
        alpha: exponent of the attention; 0 leaves coverage alone.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.alpha >= 0, "alpha", self.alpha, "0 or more")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the tower's output: features are compared, and nothing is merged."""
        del depth
        return (Site("vision"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's attention, and the crop of each token."""
        del site
        return (Need("cls_attention"), Need("tile"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep a covering set of each crop.

        Cost: O(M^2 D / 2) for the similarities of a crop of M tokens, then O(P M) for each kept one, with
        32 or a few times as many merits P computed anew: 1.1 of X X^T at 576 tokens, 0.7 at 2,880. On a card all M
        merits of a pick are computed, and the host waits once for all picks.
        """
        attention = require_finite(view.signals["cls_attention"].float(), "class attention")
        crops = Crops.of(view.grid, view.signals["tile"])
        groups = Groups.of(crops.index)
        quotas = apportion(crops.size, crops.size, keep)[:, : groups.size.shape[1]].flatten()
        # Padding has no features, so that it covers nothing and needs no cover.
        similarity = cosine(groups.rows(require_finite(view.tokens, "tokens")))
        saliency = groups.rows(attention) ** self.alpha
        saliency = saliency.masked_fill(~groups.valid.flatten(0, 1), -torch.inf)
        # On a card few kernels without a read cost less than few merits.
        covering = _covering if similarity.device.type == "cpu" else _densely_covering
        return Plan(groups.kept(covering(similarity, saliency, quotas), keep), scores=attention)


def _covering(similarity: Tensor, saliency: Tensor, quotas: Tensor) -> Tensor:
    """Return (R, M) booleans: `quotas` (R,) greedy picks by similarity (R, M, M) and saliency (R, M), -inf for none."""
    chosen = torch.zeros_like(saliency, dtype=torch.bool)
    counts = (side.tolist() for side in read(saliency.isfinite().sum(dim=1), quotas))
    for row, (n_patches, n_picks) in enumerate(zip(*counts, strict=True)):
        sides = similarity[row, :n_patches].numpy(), saliency[row, :n_patches].numpy()
        chosen[row, _picks(*sides, n_picks)] = True
    return chosen


def _picks(similarity: np.ndarray, saliency: np.ndarray, n_picks: int) -> list[int]:
    """Return `n_picks` greedy picks of M patches, by similarity (M, N) with padding and saliency (M,)."""
    covered, picks = np.zeros(similarity.shape[1], np.float32), list[int]()

    def merits(panel: slice | np.ndarray) -> np.ndarray:
        gains = np.maximum(similarity[panel], covered)
        gains -= covered
        merit: np.ndarray = gains.sum(axis=1) * saliency[panel]
        return merit

    n_patches = len(similarity)
    bound = np.concatenate(
        [merits(slice(i, i + PANEL)) for i in range(0, max(n_patches, 1), PANEL)]
    )
    # More coverage never raises a gain, so that an old merit bounds the new one: the best are computed anew until the
    # highest is of this step.
    while len(picks) < n_picks:
        # Panels hold stale merits alone: among ties a panel would never reach the pick.
        stale, pick = bound.copy(), int(bound.argmax())
        while stale[pick] > -np.inf:
            panel = stale.argpartition(max(n_patches - PANEL, 0))[-PANEL:]
            panel = panel[stale[panel] > -np.inf]
            bound[panel], stale[panel] = merits(panel), -np.inf
            pick = int(bound.argmax())
        picks.append(pick)
        bound[pick] = -np.inf
        np.maximum(covered, similarity[pick], out=covered)
    return picks


def _densely_covering(similarity: Tensor, saliency: Tensor, quotas: Tensor) -> Tensor:
    """Return `_covering` with all merits computed at each pick, in eight or nine kernels and without a read."""
    barred = torch.zeros_like(saliency).masked_fill_(saliency.isinf(), -torch.inf)
    saliency = saliency.masked_fill(saliency.isinf(), 0)
    covered, uncovered = torch.zeros_like(saliency), torch.empty_like(similarity)
    cosines, n_steps = Held(similarity), int(read(quotas.max())[0])
    picks = torch.zeros(len(quotas), n_steps, dtype=torch.long, device=quotas.device)
    for pick in picks.split(1, dim=1):
        torch.sub(similarity, covered.unsqueeze(1), out=uncovered).clamp_(min=0)
        merits = torch.addcmul(barred, uncovered.sum(dim=2), saliency)
        torch.argmax(merits, dim=1, keepdim=True, out=pick)
        barred.scatter_(1, pick, -torch.inf)
        torch.maximum(covered, cosines.row(pick, merits), out=covered)
    in_quota = torch.arange(n_steps, device=quotas.device) < quotas.unsqueeze(1)
    return torch.zeros_like(saliency).scatter_reduce_(1, picks, in_quota.float(), "amax").bool()
