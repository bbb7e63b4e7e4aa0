"""VisionTrim: unified compression of vision tokens, without training (Yu et al., ICLR 2026, arXiv 2601.22674).

Acts on the projected tokens x, before the decoder. Of k tokens, round(3 k / 4) are dominant, and the others complement
them:

    dominant    the highest c_i / (2 |c|) + r_i / (2 |r|), with c the attention of the tower's class token and r the
                attention that a patch receives from all, in the layer that the projector reads
    complement  of the others, those with the highest mean over the prompt's words w of cos(w, x_i) are centres y_j.
                Three times in turn each token left goes to the j with the highest sum_w cos(x_i, w) cos(w, y_j), and
                y_j grows by the mean of the tokens that came to it

Differs: followed is the released code (github.com/hanxunyu/VisionTrim, commit 22b686d6, removed in 5e299c0d) with its
48 and 16 of 64 tokens. The code computes the paper's local affinity of neighbours too, and overwrites it; the paper's
text, in which the decoder compresses once more, was not compared. The authors take words from CLIP's text tower, which
multimodal models do not include, and merge before the projector. Here words and tokens are those that enter the
decoder, as in CDPruner, and all text of the prompt counts. r includes the attention from the class token and from the
patch itself, which the code leaves out. The code puts centres after the dominant tokens; here they stay in place. The
tokens of all crops of a picture compete together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Mixture, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_finite
from espalier.methods.select.similarity import unit
from espalier.methods.select.topk import ranking, rows_of, top


@dataclass(frozen=True)
class VisionTrim(TokenReducer):
    """Keeps what the tower attends to, and merges the rest around tokens like the prompt's words.

    Attributes:
        dominant: share of the kept tokens that the tower's attention chooses.
        rounds: times that centres grow; 0: all other tokens are dropped.
    """

    dominant: float = 0.75
    rounds: int = 3

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(0 <= self.dominant <= 1, "dominant", self.dominant, "0 to 1")
        require(self.rounds >= 0, "rounds", self.rounds, "0 or more")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the projected tokens, before the decoder."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return both attentions in the tower, and the words."""
        del site
        return (Need("cls_attention"), Need("tower_received"), Need("text_embeddings"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep dominant tokens and grown centres.

        Cost: O(N T D) for the likeness of N tokens and T words, and O(N R (T + D)) for each round with R centres.
        """
        signals, tokens = view.signals, view.tokens.float()
        attentions = (signals[name].float() for name in ("cls_attention", "tower_received"))
        scores = sum((normalize(part, dim=1) for part in attentions), tokens.new_zeros(())) / 2
        n_dominant = math.floor(self.dominant * keep + 0.5)
        chosen = ranking(scores)[:, :n_dominant]
        words = unit(signals["text_embeddings"])
        likeness = require_finite(unit(tokens) @ words.transpose(1, 2), "likeness to words")
        if n_dominant == keep or keep == tokens.shape[1]:
            return Plan(top(scores, keep), scores=scores)
        # Below any sum of T cosines: no dominant token becomes a centre.
        relevance = likeness.sum(dim=2).scatter(1, chosen, -float(likeness.shape[2]) - 1)
        centres = top(relevance, keep - n_dominant)
        kept = torch.cat([chosen, centres], dim=1).sort(dim=1).values
        matrix = tokens.new_zeros(*kept.shape, tokens.shape[1]).scatter_(2, kept.unsqueeze(2), 1.0)
        remainder, places = 1 - matrix.sum(dim=1), torch.searchsorted(kept, centres)
        matrix[rows_of(centres), places] += self.growth(tokens, centres, remainder, likeness, words)
        return Plan(kept, Mixture(matrix), scores=scores)

    def growth(
        self, tokens: Tensor, centres: Tensor, remainder: Tensor, likeness: Tensor, words: Tensor
    ) -> Tensor:
        """Return (B, R, N) weights in `centres` (B, R) of the tokens with 1 in `remainder` (B, N)."""
        values = tokens[rows_of(centres), centres]
        total = tokens.new_zeros(*centres.shape, tokens.shape[1])
        for _ in range(self.rounds):
            of_words = unit(values) @ words.transpose(1, 2)
            nearest = (of_words @ likeness.transpose(1, 2)).argmax(dim=1)
            weight = torch.zeros_like(total).scatter_(
                1, nearest.unsqueeze(1), remainder.unsqueeze(1)
            )
            weight /= weight.sum(dim=2, keepdim=True).clamp(min=1)
            values = values + weight @ tokens
            total += weight
        return total
