"""IVTP: "Instruction-Guided Visual Token Pruning for Large Vision-Language Models" (Huang et al., ECCV 2024).

An unverified re-implementation: no code was released, and everything marked "ours" below is our reading. Layers form
groups of three. Inside a group attention is accumulated by rollout; at its end tokens are pruned:

    R = product over the group's layers of (0.5 A + 0.5 I)       A: mean over heads; the weights 0.5 are ours

    tower     a_j = R[class token, j]           at the end of every group of blocks
    decoder   a_j = sum over words t of w_t R[t, j],   w = softmax over t of cos(h_t, mean of all visual h)
              at the end of every group of the first 12 layers

and the tokens with the highest a stay, equal ones by lower index.

Differs: no code was released. In the paper, words that are relevant to the image are pooled into one more token, a
pseudo class token, and a is its row of R; ours weights the rows of the words and adds no token, so that the sequence
stays as it is. The paper takes a word's relevance from CLIP's similarity and a threshold, which only models with CLIP's
text encoder have; ours is the softmax above, over the words after the image, h as they enter the next layer. Also ours:
nothing is pruned after the last full group of the tower (a tower shorter than a group is one); towers without a class
token take the mean over all rows of R; the tower prunes down to sqrt(share) and the decoder from there to share, each
in steps of equal ratio; decoders shallower than 32 layers are pruned at the same shares of their depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require
from espalier.methods.select.topk import top
from espalier.methods.select.words import words_after


@dataclass(frozen=True)
class IVTP(TokenReducer):
    """Prunes by attention rollout, group by group: by the class token in the tower, by the words in the decoder.

    Attributes:
        group: layers of a group.
        layers: decoder layers in which tokens go, from the first on.
        depth: decoder layers of the model that `layers` are meant for; shallower ones are pruned at the same shares.
    """

    group: int = 3
    layers: int = 12
    depth: int = 32

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.group >= 1, "group", self.group, "1 or more")
        valid = f"{self.group} (one group) or more"
        require(self.layers >= self.group, "layers", self.layers, valid)
        valid = f"more than {self.layers} (layers)"
        require(self.depth > self.layers, "depth", self.depth, valid)

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        """Return the last block of each full group, or of a tower that is shorter than one."""
        ends = range(min(self.group, blocks), blocks + 1, self.group)
        return tuple(Site("tower", end - 1) for end in ends if end)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites after the decoder's groups, each once.

        A decoder with fewer layers than groups has a site before every layer but the first.

        Raises:
            MethodError: there is no layer to prune after.
        """
        require(depth > 1, "layers", self.layers, "none: the model has one decoder layer")
        scale = min(1.0, depth / self.depth)
        layers = [0]
        for end in range(self.group, self.layers + 1, self.group):
            layers.append(max(layers[-1] + 1, math.floor(end * scale + 0.5)))
        return tuple(Site("layer", layer) for layer in layers[1:] if layer < depth)

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return equal ratios down to sqrt(share) in the tower, and from there to `share` in the decoder.

        The last sites, one for each group, are the decoder's; the first is always the tower's.
        """
        n_decoder = max(1, min(self.layers // self.group, n_sites - 1))
        n_tower = n_sites - n_decoder
        halfway = 0.5 if n_tower else 0.0
        tower = (halfway * site / n_tower for site in range(1, n_tower + 1))
        remaining = 1 - halfway
        decoder = (halfway + remaining * site / n_decoder for site in range(1, n_decoder + 1))
        return tuple(share**power for power in (*tower, *decoder))

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the rollout of the group, and in the decoder the states that weight its words."""
        if site.where == "tower":
            return (Need("rollout"),)
        names = ("text_rollout", "text_states", "text_positions", "all_positions")
        return tuple(map(Need, names))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the highest. Cost: O(N log N), in the decoder O(T (N + D)) more."""
        if view.site.where == "tower":
            return Plan(top(view.signals["rollout"].float(), keep))
        rows = view.signals["text_rollout"].float()
        scores = (self.weights(view).unsqueeze(1) @ rows).squeeze(1)
        return Plan(top(scores, keep), scores=scores)

    def weights(self, view: View) -> Tensor:
        """Return (B, T) the weight of each word: positive after the image, summing to 1, and 0 elsewhere."""
        signals = view.signals
        after = words_after(signals["text_positions"], signals["all_positions"])
        image = normalize(view.tokens.float().mean(dim=1), dim=-1)
        words = normalize(signals["text_states"].float(), dim=-1)
        closeness = (words @ image.unsqueeze(2)).squeeze(2)
        return closeness.masked_fill(~after, -math.inf).softmax(dim=1)
