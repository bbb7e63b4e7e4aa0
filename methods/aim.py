"""AIM: "Adaptive Inference via Token Merging and Pruning" (Zhong et al., ICCV 2025, arXiv 2412.03248).

Before the decoder, the projected tokens z of each picture or frame merge in rounds. In a round they are split
alternately into A (even places) and B (odd places), each a of A has its partner argmax_b cos(z_a, z_b), and at most
half of the tokens, those with the highest cosine to their partner, go into it; a token becomes the unweighted mean of
itself and of those that came. Two rounds leave a quarter. Then the decoder drops tokens after each of some layers in a
row, by PageRank over the attention A_h = softmax(q k / (0.1 sqrt d)) of that layer, words included:

    r_h <- r_h A_h, five times, from equal ranks;    s_j = sqrt(1/H sum_h r_hj^2)

Of the merged tokens, 7/8, 6/8, ... 1/8 are left after layers 14, 15, ... 20 (from 0) of 28, and none after layer 21.
ratio=0.96875 under budget=kept is this schedule after merging to a quarter; any other budget is solved for what merging
leaves, and where that is all, for the slope.

Differs: followed is the released code (github.com/LaVi-Lab/AIM, commit edc24e9f), which merges the frames of videos.
The last eighth stays to the end here, where the code hides it after layer 21. The code hides tokens by masks, so that
those hidden earlier still give away their equal share in the first round of PageRank; here they are gone. Tokens keep
raster order, where the code has what remains of A before B; after a round of halves nothing remains. Pictures share the
budget by size, by largest remainders. The code counts positions anew after merging, not inside the decoder. The paper's
text was not compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import read, require
from espalier.methods.select.bipartite import means, merge_pairs, shares
from espalier.methods.select.groups import Groups
from espalier.methods.select.quotas import apportion
from espalier.methods.select.stills import plan_of
from espalier.methods.select.tiles import Tiles
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class AIM(TokenReducer):
    """Merges similar tokens before the decoder, and drops unimportant ones layer by layer inside.

    Attributes:
        first: decoder layer, from 0, after which tokens go first.
        last: decoder layer after which tokens go last.
        depth: decoder layers of the model that these are meant for; others act at the same shares of their depth.
    """

    first: int = 14
    last: int = 20
    depth: int = 28

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        valid = f"0 to last, last below {self.depth - 1} (method.params.depth - 1)"
        require(0 <= self.first <= self.last < self.depth - 1, "first", self.first, valid)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix and the sites after `first` to `last`, at the same shares of the depth."""
        start, end = (
            max(1, math.floor((layer + 1) * depth / self.depth + 0.5))
            for layer in (self.first, self.last)
        )
        inside = range(min(start, depth - 1), min(end, depth - 1) + 1)
        return (Site("prefix"), *(Site("layer", layer) for layer in inside))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return a straight line from what merging leaves to `share`, which is one step."""
        merged = min(1.0, share * n_sites)
        return tuple(merged - (merged - share) * n / (n_sites - 1) for n in range(n_sites))

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the ranks, inside the decoder."""
        return () if site.where == "prefix" else (Need("page_rank"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Merge or prune. Cost: merging O(N^2 D / 3 + N D), pruning O(N log N) after the ranks."""
        if view.site.where == "layer":
            scores = view.signals["page_rank"].float()
            return Plan(top(scores, keep), scores=scores)
        tokens = view.tokens.float()
        tiles = Tiles.of(view.grid)
        groups, quotas = Groups.of(tiles.index), apportion(tiles.size, tiles.size, keep)
        quota, size = quotas[:, : groups.size.shape[1]].flatten(), groups.size.flatten()
        index = groups.index.flatten(0, 1)
        row = torch.arange(len(index), device=index.device).unsqueeze(1) // groups.index.shape[1]
        target = torch.full_like(index, -1)
        weight = torch.ones_like(index, dtype=tokens.dtype)
        # Pictures of one size and quota merge side by side; few kinds of them are in a batch.
        kinds = torch.stack(read(size, quota), 1)
        for kind in kinds.unique(dim=0):
            picture_size, n_left = kind.tolist()
            if n_left:
                alike = (kinds == kind).all(dim=1)
                part = (alike, slice(picture_size))
                features = (
                    tokens.reshape(-1, picture_size, tokens.shape[2])  # spares a copy
                    if alike.all()
                    else tokens[row[alike], index[part]]
                )
                target[part], weight[part] = merged(features, n_left)
        # Tokens of each group stand together, so that an index inside the group counts from its first token.
        into = groups.tokens(torch.where(target < 0, -1, target + index[:, :1]))
        plan = plan_of(into, groups.tokens(weight), keep)
        return plan if keep < into.shape[1] else Plan(plan.kept)


def merged(features: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Return (B, N) the token that each goes into and its weight there, after rounds that leave `keep` of (B, N, D)."""
    n_rows, n_tokens = features.shape[:2]
    kept = torch.arange(n_tokens, device=features.device).expand(n_rows, -1)
    slot, weight = kept, features.new_ones(n_rows, n_tokens)
    while (n_left := kept.shape[1]) > keep:
        n_pairs = min(n_left - keep, n_left // 2)
        staying, into = merge_pairs(features, n_pairs)
        share = shares(into, features.new_ones(n_rows, n_left))
        weight = weight * share.gather(1, slot)
        if n_left - n_pairs > keep:
            features = means(features, into, n_left - n_pairs)
        kept, slot = kept.gather(1, staying), into.gather(1, slot)
    return kept.gather(1, slot), weight
