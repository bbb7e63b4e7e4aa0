"""VScan: "Rethinking Visual Token Reduction for Efficient LVLMs" (Zhang et al., TMLR 2026, arXiv 2505.22654).

Two stages. Before the decoder, every crop keeps its share T of the stage's budget, with a(l) the attention that the
tower's class token pays a patch in layer l, mean over heads:

    local    floor(T / 2) patches: in each window of 6 x 6 patches the same number, by a(6)
    global   the T - floor(T / 2) others with the highest a in the layer that the projector reads

and each other token joins the kept one of its crop with the highest cosine of projected tokens; a kept token becomes
the mean of itself and of those that joined it. In the middle of the decoder (layer 16 of 32), the tokens to which the
last prompt token pays the most attention in that layer stay: a third of them (96, then 32 of 576 are 64 on average).

Differs: the paper's method and the code (github.com/Tencent/SelfEvolvingAgent, commit a82450e1) do not differ. The code
keeps fewer tokens where the local ones do not divide by the number of windows; here windows get them by largest
remainders. It takes 24 x 24 patches only; here windows are cut off where a grid ends, with quotas by their size. It has
windows of 4 and layer 14 of 28 for Qwen2.5-VL. Tokens stand in raster order and position numbers close up after both
stages, as in the code. Towers of another depth than 24 are read at the same share of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from espalier.methods.base import Assignment, Need, Plan, Positions, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_finite
from espalier.methods.select.crops import Crops
from espalier.methods.select.groups import Groups
from espalier.methods.select.merge import slot_sizes
from espalier.methods.select.quotas import apportion
from espalier.methods.select.scans import nearest_of_crop, scanned
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class VScan(TokenReducer):
    """Keeps patches that stand out in the picture or in their window, merges the others, and prunes in the decoder.

    Attributes:
        layer: decoder layer before which the second stage acts; null is the middle.
        second: share of what the first stage kept that the second keeps, at most.
        local_layer: tower layer of the local scan, from 1.
        depth: tower layers of the model that `local_layer` is meant for.
        local: share of the first stage's tokens that are local.
        window: patches along the edge of a window.
    """

    layer: int | None = None
    second: float = 1 / 3
    local_layer: int = 6
    depth: int = 24
    local: float = 0.5
    window: int = 6

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.layer is None or self.layer >= 1, "layer", self.layer, "1 or more, or null")
        require(0 < self.second <= 1, "second", self.second, "a number in (0, 1]")
        require(self.depth >= 1, "depth", self.depth, "1 or more")
        inside = 1 <= self.local_layer <= self.depth
        require(inside, "local_layer", self.local_layer, f"1 to {self.depth} (method.params.depth)")
        require(0 <= self.local <= 1, "local", self.local, "a number from 0 to 1")
        require(self.window >= 1, "window", self.window, "1 or more")

    @property
    def shallow(self) -> Need:
        """The class attention of the local scan."""
        return Need("cls_attention", layer=self.local_layer - 1, depth=self.depth)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the projected tokens and a place in the decoder."""
        layer = max(1, depth // 2) if self.layer is None else self.layer
        return (Site("prefix"), layer_site("layer", layer, depth))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return the share that each stage keeps: by default three times as much in the first, at most all."""
        del n_sites
        return (min(1.0, share / self.second), share)

    def positions(self, depth: int) -> Positions:
        """Close the gaps after both stages, as the released code."""
        del depth
        return "renumbered"

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals of the stage."""
        if site.where == "layer":
            return (Need("next_last_attention"),)
        return (self.shallow, Need("cls_attention"), Need("tile"))

    def plan(self, view: View, keep: int) -> Plan:
        """Carry out the stage of the view's site.

        Cost: stage 1 O(N log N + keep N D), stage 2 O(N log N) after a layer's projections.
        """
        if view.site.where == "layer":
            scores = view.signals["next_last_attention"].float()
            return Plan(top(scores, keep), scores=scores)
        deep = require_finite(view.signals["cls_attention"].float(), "class attention")
        crops = Crops.of(view.grid, view.signals["tile"])
        groups, quotas = Groups.of(crops.index), apportion(crops.size, crops.size, keep)
        share = quotas[:, : groups.size.shape[1]].flatten().unsqueeze(1)
        shallow = require_finite(view.signals[self.shallow.key].float(), "local layer's attention")
        chosen = scanned(groups, view.grid, (shallow, deep), share, self.local, self.window)
        index = groups.kept(chosen, keep)
        kept = groups.tokens(chosen)
        joined = nearest_of_crop(view.tokens, crops.index, index)
        slot = torch.where(kept, kept.cumsum(dim=1) - 1, joined)
        slot = slot.masked_fill(crops.of_token(quotas) == 0, -1)
        size = slot_sizes(slot).to(torch.promote_types(view.tokens.dtype, torch.float32))
        return Plan(index, Assignment(slot, 1 / size.clamp(min=1)), scores=deep)
