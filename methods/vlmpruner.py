"""VLM-Pruner: "Buffering for Spatial Sparsity in a Centrifugal Paradigm" (Wu et al., 2025, arXiv 2512.02700).

Before decoder layer K, with the keys k of layer K-1 (rotary positions applied, heads side by side) and its output x,
the kept set S grows outwards from a few pivots:

    pivots     argmax |k_i|_1, then again and again the token with the largest min_{j in S} |k_i - k_j|_2
    likeness   l_i = max_{j in S} cos(x_i, x_j) (1 + 1/2 min_{j in S} dist(i, j) / diagonal)

cos is over the 256 channels of x with the largest variance over the picture, dist between places in the patch grid: a
token far from S looks more alike and waits. In a round the others are sorted by rising l and walked through 16 at a
time; of these, the ones with l_i < theta for the S at that moment join. A round ends at once if its first 16 bring
none. theta starts at 0.8 and rises by 0.1 a round, until S is full; of a group too large for what is missing, those
with the lowest l join. At last each other token goes to the kept one with the highest cosine w, and a kept token with a
positive sum of w becomes 0.3 x + 0.7 (sum w x) / (sum w).

Differs: followed is the released code (github.com/Casey-bit/VLMPruner, commit 556a9142) for LLaVA-1.5; the paper's text
was not compared. The code stops short of the count when a round brings none; here theta goes on rising. Its grid has 24
columns and its diagonal is 24 sqrt(2); here they are those of the picture, and tokens of other pictures or crops are a
diagonal away. Equal l go to the lower index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Assignment, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_finite
from espalier.methods.select.cosines import Cosines, cosines
from espalier.methods.select.kept_set import KeptSet
from espalier.methods.select.maxmin import longest_then_farthest
from espalier.methods.select.topk import indices_of

#: What theta rises by in a round, and the weight of what merges into a kept token.
RISE, MERGED = 0.1, 0.7


@dataclass(frozen=True)
class VLMPruner(TokenReducer):
    """Keeps tokens unlike the kept ones, near ones first, and merges the others into them.

    Attributes:
        K: decoder layer before which tokens go (layers 0..K-1 see all of them).
        pivot_image_token: pivots.
        threshold: likeness below which a token joins in the first round, theta.
        token_batch: tokens that are compared with the kept set at a time.
        channels: channels of the states that are compared.
    """

    K: int = 2
    pivot_image_token: int = 4
    threshold: float = 0.8
    token_batch: int = 16
    channels: int = 256

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.K >= 1, "K", self.K, "1 or more (the keys of layer K-1 are read)")
        for key in ("pivot_image_token", "token_batch", "channels"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "1 or more")
        require(0 < self.threshold <= 1, "threshold", self.threshold, "a number above 0, at most 1")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer K."""
        return (layer_site("K", self.K, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the keys of layer K-1."""
        del site
        return (Need("visual_keys"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep from the pivots outwards, and merge.

        Cost: O(N^2 C / 2) for the similarities over C channels, then a few rounds of N / 16 steps of O(16 N), each with
        one device synchronisation.
        """
        keys = require_finite(view.signals["visual_keys"].float(), "keys").transpose(1, 2)
        tokens = view.tokens.float()
        varied = tokens.var(dim=1).topk(min(self.channels, tokens.shape[2]), dim=1).indices
        similarity = cosines(tokens.gather(2, varied.unsqueeze(1).expand(-1, tokens.shape[1], -1)))
        require_finite(similarity.diagonal(), "tokens")
        kept_set = KeptSet(similarity, view.grid)
        for pick in longest_then_farthest(keys.flatten(2), min(keep, self.pivot_image_token)).split(
            1, dim=1
        ):
            kept_set.add(pick, torch.ones_like(pick, dtype=torch.bool))
        theta = self.threshold
        while kept_set.grow(keep, theta, self.token_batch):
            theta += RISE
        chosen = kept_set.chosen
        kept = indices_of(chosen, keep)
        if keep == chosen.shape[1]:
            return Plan(kept)
        return Plan(kept, into_the_likest(similarity, chosen, kept))


def into_the_likest(similarity: Cosines, chosen: Tensor, kept: Tensor) -> Assignment:
    """Return how the tokens that are not `chosen` (B, N) merge into those `kept` (B, K)."""
    weight, slot = similarity.rows(kept).max(dim=1)
    weight = weight.masked_fill(chosen, 0)
    total = torch.zeros_like(kept, dtype=weight.dtype).scatter_add(1, slot, weight)
    merges = (total > 0).gather(1, slot)
    share = MERGED * weight / total.clamp(min=1e-8).gather(1, slot)
    place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    slot = torch.where(merges & ~chosen, slot, -1).scatter(1, kept, place)
    kept_weight = torch.where(total > 0, 1 - MERGED, 1.0)
    return Assignment(slot, share.masked_fill(slot < 0, 0).scatter(1, kept, kept_weight))
