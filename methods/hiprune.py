"""HiPrune: hierarchical attention for visual token pruning (Liu et al., ACL Findings 2026, arXiv 2508.00553).

Acts on the projected tokens, before the decoder, on every crop with its share T of the budget. With a(l) the attention
that a patch receives in tower layer l, mean over heads and all queries, and c the columns of the crop:

    anchors    I_A = the round(alpha T / 5) patches with the highest a(l) in the object layer l
    buffers    I_B = I_A - 1, I_A + 1, I_A - c, I_A + c
    registers  the T - |I_A u I_B| others with the highest a in the layer that the projector reads

Neighbours are places in raster order, so that the neighbour of a row's last patch is the next row's first, in both
readings; they differ where a neighbour lies before the first or after the last patch:

    paper    (border=drop):  it is left out
    official (border=clamp): the first or the last patch is taken in its place

The released code (github.com/Danielement321/HiPrune, commit 6e83a124) has l = 9 for CLIP's 24 layers and l = 16 for the
32 of Qwen2.5-VL (object_layer=16 depth=32); towers of another depth are read at the same share of it.

Differs: the code counts padding of high-resolution crops as tokens; here a crop's share refers to its tokens in the
prompt, and shares that are not whole numbers go by largest remainders. If anchors and buffers are more than T, buffers
with low a(-1) go; the code fails there. HiPrune++, which adds tokens by CLIP's text tower, is not in the code and left
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_choices, require_finite
from espalier.methods.select.crops import Crops
from espalier.methods.select.groups import Groups
from espalier.methods.select.quotas import apportion, top_of_groups
from espalier.methods.select.topk import ranking

Border = Literal["drop", "clamp"]


@dataclass(frozen=True)
class HiPrune(TokenReducer):
    """Keeps patches that objects and their surroundings stand on, and patches that hold what the picture is as a whole.

    Attributes:
        alpha: share of the kept tokens that are anchors and buffers.
        object_layer: tower layer of the anchors, from 1.
        depth: tower layers of the model that `object_layer` is meant for.
        border: what takes the place of a neighbour outside the raster.
    """

    alpha: float = 0.1
    object_layer: int = 9
    depth: int = 24
    border: Border = "drop"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "a number from 0 to 1")
        require(self.depth >= 1, "depth", self.depth, "1 or more")
        inside = 1 <= self.object_layer <= self.depth
        require(
            inside, "object_layer", self.object_layer, f"1 to {self.depth} (method.params.depth)"
        )
        require_choices(self, border=Border)

    @property
    def objects(self) -> Need:
        """The attention received in the object layer."""
        return Need("tower_received", layer=self.object_layer - 1, depth=self.depth)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the projected tokens, before the decoder."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the attention received in two tower layers, and the crop of each token."""
        del site
        return (self.objects, Need("tower_received"), Need("tile"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep anchors, buffers and registers. Cost: O(N log N) after the attention of two tower layers."""
        shallow = require_finite(view.signals[self.objects.key].float(), "object layer's attention")
        deep = require_finite(view.signals["tower_received"].float(), "attention received")
        crops = Crops.of(view.grid, view.signals["tile"])
        groups = Groups.of(crops.index)
        quotas = apportion(crops.size, crops.size, keep)
        share = quotas[:, : groups.size.shape[1]].flatten().unsqueeze(1)
        scores = groups.rows(shallow).masked_fill(~groups.valid.flatten(0, 1), -1.0)
        order = ranking(scores)
        place = torch.arange(order.shape[1], device=order.device)
        is_anchor = place < (share.double() * self.alpha / 5).round()
        anchors = torch.zeros_like(is_anchor).scatter(1, order, is_anchor)
        first = groups.tokens(anchors.long() + self.around(anchors, groups, view.grid[:, :, 2]))
        # Anchors first, then buffers, then registers, each by the deep attention.
        rank = ranking(deep).argsort(dim=1)
        kept = top_of_groups(first * deep.shape[1] - rank, crops.index, quotas, keep)
        return Plan(kept, scores=deep)

    def around(self, anchors: Tensor, groups: Groups, row: Tensor) -> Tensor:
        """Return (R, M) 1 for anchors and their neighbours, else 0.

        Args:
            anchors: (R, M) booleans, a row for each of `groups`.
            groups: the crops.
            row: (B, N) row of each token in the patch grid.
        """
        rows, size = groups.rows(row), groups.size.flatten().unsqueeze(1)
        columns = ((rows == rows[:, :1]) & groups.valid.flatten(0, 1)).sum(dim=1, keepdim=True)
        place = torch.arange(anchors.shape[1], device=anchors.device)
        marks, last = anchors.long(), (size - 1).clamp(min=0)
        for step in (-1, 1, -columns, columns):
            target = (place + step).expand_as(anchors)
            taken = anchors
            if self.border == "drop":
                taken = anchors & (target >= 0) & (target <= last)
            marks.scatter_reduce_(1, target.clamp(min=0).minimum(last), taken.long(), "amax")
        return marks
