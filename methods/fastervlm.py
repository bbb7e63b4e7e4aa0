"""FasterVLM: "[CLS] Attention is All You Need for Training-Free Visual Token Pruning" (Zhang et al., arXiv 2412.01818).

Before the decoder, the tokens are ranked by the attention that the tower's class token pays their patches, mean over
heads, in the layer that feeds the projector, and the highest stay in raster order. The class token of each crop and of
each frame sees that crop alone, so scores are not comparable across crops: as in the released code, every crop keeps
the same share.

Differs: the code drops AnyRes padding and newlines before it counts; here a crop's share refers to its tokens in the
prompt. Paper and code do not differ otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.select.crops import Crops
from espalier.methods.select.quotas import apportion, top_of_groups


@dataclass(frozen=True)
class FasterVLM(TokenReducer):
    """Keeps the patches that the class token attends to most, the same share of every crop."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix: projected tokens go, nothing is merged."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's attention, and the crop of each token."""
        del site
        return (Need("cls_attention"), Need("tile"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the best of each crop. Cost: O(N log N)."""
        crops = Crops.of(view.grid, view.signals["tile"])
        quotas = apportion(crops.size, crops.size, keep)
        scores = view.signals["cls_attention"].float()
        return Plan(top_of_groups(scores, crops.index, quotas, keep), scores=scores)
