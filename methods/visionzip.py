"""VisionZip: "Longer is Better but Not Necessary in Vision Language Models" (Yang et al., 2025, arXiv 2412.04467).

Acts on the tower's output, before the projector. Of `keep` tokens, round(54/64 keep) are dominant: the patches to
which the class token pays the most attention. Of the other patches, in raster order, every (rest // C)-th is a
contextual target, C in all; each remaining patch j joins the target t with the highest cosine of keys (mean over
heads):

    paper    (contextual=mean):             x'_t = mean of x_t and of all x_j that joined t
    official (contextual=target_plus_mean): x'_t = x_t + mean of all x_j that joined t, or x_t if none did

Differs: the authors count the class token itself as one dominant token and hand it to the language model. Here the
class token never reaches the projector, so its slot goes to the next dominant patch. A contextual token stands at its
target's place in raster order (as in the authors' code for Qwen2.5-VL; their code for LLaVA puts them after all
dominant ones). On LLaVA-NeXT their code neither cuts padding off nor puts newline tokens between rows; here padding is
gone and newlines stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Assignment, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_choices, require_finite
from espalier.methods.select.merge import slot_sizes
from espalier.methods.select.topk import indices_of, ranking, rows_of

Contextual = Literal["mean", "target_plus_mean"]


@dataclass(frozen=True)
class VisionZip(TokenReducer):
    """Keeps the patches that the class token attends to most, and merges the others by their keys.

    Attributes:
        dominant_share: share of the kept tokens that are dominant; the rest are contextual.
        contextual: how a contextual token is made of its target and of what joined it.
    """

    dominant_share: float = 54 / 64
    contextual: Contextual = "mean"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        share = self.dominant_share
        require(0 <= share <= 1, "dominant_share", share, "a number from 0 to 1")
        require_choices(self, contextual=Contextual)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the tower's output."""
        del depth
        return (Site("vision"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's attention and the keys of the layer that feeds the projector."""
        del site
        return (Need("cls_attention"), Need("tower_keys"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep dominant patches and contextual targets, merge the rest. Cost: O(N log N + N C Dk)."""
        n_dominant = math.floor(keep * self.dominant_share + 0.5)
        attention = view.signals["cls_attention"].float()
        order = ranking(attention)
        kept = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :n_dominant], True)
        n_rest, n_targets = order.shape[1] - n_dominant, keep - n_dominant
        others_index = indices_of(~kept, n_rest)
        targets = others_index[:, :: max(1, n_rest // max(1, n_targets))][:, :n_targets]
        kept.scatter_(1, targets, True)

        slot = kept.cumsum(dim=1) - 1
        joined = self._join(view.signals["tower_keys"], targets, slot)
        slot = torch.where(kept, slot, joined)
        weights = self._weights(slot, kept, torch.promote_types(view.tokens.dtype, torch.float32))
        return Plan(indices_of(kept, keep), Assignment(slot, weights), scores=attention)

    def _join(self, keys: Tensor, targets: Tensor, slot: Tensor) -> Tensor:
        """Return (B, N) the slot of the target with the key nearest to each token's, -1 without a target."""
        if targets.shape[1] == 0:
            return torch.full_like(slot, -1)
        units = normalize(keys.float(), dim=-1)
        similarity = units @ units[rows_of(targets), targets].transpose(1, 2)
        nearest = require_finite(similarity, "cosine of tower keys").argmax(dim=2)
        return slot.gather(1, targets.gather(1, nearest))

    def _weights(self, slot: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (B, N) the weight of each token in its slot."""
        size = slot_sizes(slot).to(dtype)
        if self.contextual == "mean":
            return 1 / size.clamp(min=1)
        return torch.where(kept, 1.0, 1 / (size - 1).clamp(min=1))
