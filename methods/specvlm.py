"""SpecVLM's attention-guided pruning (Ji et al., EMNLP 2025, arXiv 2508.16201), as a reducer by itself.

The score of a visual token j is the attention of the words after the images, the template's end included:

    s_j = mean over layers l, heads h and words t of A^l_h[t, j]

    stage I:  the fewest tokens with the highest s_j that reach 0.4 of the sum of all, at most `keep`
    stage II: of the m other tokens, in their order, the f that are missing: those at floor(q (m - 1) / (f - 1)),
              q = 0 to f - 1, so that they are spread evenly (f = 1: the first)

Differs: in the paper a verifier scores the video for its draft model, with the attention of all its layers. Here the
model prunes itself before decoder layer `layer`, so only the layers before it count: all of them (guidance=layers, the
nearest to the paper) or the one just before (guidance=last). The paper states no such layer; 2 is common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_choices
from espalier.methods.select.topk import indices_of, ranking
from espalier.methods.select.words import words_after

Guidance = Literal["layers", "last"]


@dataclass(frozen=True)
class SpecVLM(TokenReducer):
    """Keeps the tokens that the words attend to most, up to a share of their attention, then fills up evenly.

    Attributes:
        layer: decoder layer before which tokens go.
        mass: share of the attention that stage I covers.
        guidance: attention of all `layers` before the site, or of the `last` of them.
    """

    layer: int = 2
    mass: float = 0.4
    guidance: Guidance = "layers"

    takes_separators = True  # attention alone ranks

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.layer >= 1, "layer", self.layer, "1 or more (attention before it is read)")
        require(0 <= self.mass <= 1, "mass", self.mass, "a number from 0 to 1")
        require_choices(self, guidance=Guidance)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before `layer`."""
        return (layer_site("layer", self.layer, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the words' attention in the layers before the site, and where words and tokens stand."""
        del site
        return (*self.attention(), Need("text_positions"), Need("visual_positions"))

    def attention(self) -> tuple[Need, ...]:
        """Return the attention that is read."""
        first = 0 if self.guidance == "layers" else self.layer - 1
        return tuple(Need("text_attention", layer) for layer in range(first, self.layer))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the highest until their share is reached, then fill up. Cost: O(L T N + N log N), L layers, T words."""
        scores = self.scores(view)
        chosen = covering(scores, self.mass, keep)
        return Plan(indices_of(chosen | spread(~chosen, keep), keep))

    def scores(self, view: View) -> Tensor:
        """Return (B, N) the mean attention of the words after the images."""
        signals = view.signals
        after = words_after(signals["text_positions"], signals["visual_positions"]).float()
        weight = (after / after.sum(dim=1, keepdim=True)).unsqueeze(1)
        rows = [weight @ signals[need.key].float() for need in self.attention()]
        return torch.cat(rows, dim=1).mean(dim=1)


def covering(scores: Tensor, mass: float, at_most: int) -> Tensor:
    """Return (B, N) booleans: the highest scores, the fewest that reach the share `mass` of the sum, up to `at_most`.

    Raises:
        MethodError: a score is NaN or infinite.
    """
    order = ranking(scores)
    ranked = scores.gather(1, order).double()
    covered = ranked.cumsum(dim=1)
    wanted = covered - ranked < mass * covered[:, -1:]
    wanted[:, at_most:] = False
    return torch.zeros_like(wanted).scatter(1, order, wanted)


def spread(free: Tensor, keep: int) -> Tensor:
    """Return (B, N) booleans: of the true entries of `free` (B, N), evenly spaced ones, as many as `keep` lacks.

    What is not free counts as kept already. Cost: O(N), no Python loop.
    """
    n_tokens = free.shape[1]
    n_free = free.sum(dim=1, keepdim=True)
    missing = keep - (n_tokens - n_free)
    turn = torch.arange(keep, device=free.device)
    place = turn * (n_free - 1) // (missing - 1).clamp(min=1)
    place = torch.where(
        turn < missing, place, n_tokens
    )  # one column more, for the turns that are not taken
    taken = free.new_zeros(free.shape[0], n_tokens + 1).scatter_(1, place, True)
    return free & taken.gather(1, (free.cumsum(dim=1) - 1).clamp(min=0))
