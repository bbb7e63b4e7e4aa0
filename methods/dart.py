"""DART: "Duplication Matters More", duplication-aware reduction of tokens (Wen et al., EMNLP 2025, arXiv 2502.11494).

Before decoder layer K, with the keys k of layer K-1 (rotary positions applied) and its output x after the decoder's
final norm, a few pivots p are chosen, visual tokens and words after the image, each by the largest

    |k_i|_1, summed over heads

and each pivot in turn keeps, of the visual tokens not yet taken, those least like it: the lowest cos(x_p, x_j). Words
only choose; visual pivots are kept, too.

The visual pivots choose first, then the words, both by descending norm. A prompt with fewer words has fewer pivots.

Differs: the pivots of the released code choose in the order of a Python set, which means nothing. It lets each pivot
choose floor(T / pivots) and so keeps up to a dozen tokens more or less than the T requested; here the count is exact:
the remainder of the division goes to the first pivots, one each, and the visual pivots count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_finite
from espalier.methods.select.topk import indices_of, ranking, rows_of
from espalier.methods.select.words import words_after


@dataclass(frozen=True)
class DART(TokenReducer):
    """Keeps tokens that do not duplicate a few pivots.

    Attributes:
        K: decoder layer before which tokens go (layers 0..K-1 see all of them).
        pivot_image_token: visual pivots.
        pivot_text_token: pivots among the words after the image.
    """

    K: int = 2
    pivot_image_token: int = 4
    pivot_text_token: int = 4

    takes_separators = True  # keys and states of the decoder

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.K >= 1, "K", self.K, "1 or more (the keys of layer K-1 are read)")
        require(
            self.pivot_image_token >= 1, "pivot_image_token", self.pivot_image_token, "1 or more"
        )
        require(self.pivot_text_token >= 0, "pivot_text_token", self.pivot_text_token, "0 or more")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer K."""
        return (layer_site("K", self.K, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return keys, normed states and places of visual tokens and words."""
        del site
        states = ("visual_keys", "text_keys", "normed", "text_normed")
        return tuple(map(Need, (*states, "visual_positions", "text_positions")))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the visual pivots and what each pivot chooses.

        Cost: O((N + T) H Dh) for the norms, O(P N D) for the similarities to P pivots, then P sorts of N.
        """
        signals = view.signals
        after = words_after(signals["text_positions"], signals["visual_positions"])
        visual = ranking(_norms(signals["visual_keys"]))[:, : min(self.pivot_image_token, keep)]
        # A norm is never negative: words that may not choose come last.
        norms = require_finite(_norms(signals["text_keys"]), "keys of words")
        words = ranking(norms.masked_fill(~after, -1.0))[:, : self.pivot_text_token]
        chooses = torch.cat([torch.ones_like(visual, dtype=torch.bool), after.gather(1, words)], 1)

        states, text = signals["normed"].float(), signals["text_normed"].float()
        require_finite(text.sum(dim=2), "states of words")
        pivots = torch.cat([states[rows_of(visual), visual], text[rows_of(words), words]], dim=1)
        # The states are long and the pivots few: their cosines are divided, not the states themselves.
        lengths = vector_norm(states, dim=2).clamp_(min=1e-12).unsqueeze(1)
        likeness = normalize(pivots, dim=-1) @ states.transpose(1, 2) / lengths
        quotas = _quotas(chooses, keep - visual.shape[1])
        taken = torch.zeros_like(states[..., 0], dtype=torch.bool).scatter_(1, visual, True)
        place = torch.arange(states.shape[1], device=states.device)
        require_finite(likeness, "cosines of pivots and visual tokens")
        for pivot in range(pivots.shape[1]):
            order = likeness[:, pivot].masked_fill(taken, torch.inf).argsort(dim=1, stable=True)
            taken.scatter_(
                1, order, taken.gather(1, order) | (place < quotas[:, pivot : pivot + 1])
            )
        return Plan(indices_of(taken, keep))


def _norms(keys: Tensor) -> Tensor:
    """Return (B, N) 1-norms of the (B, H, N, Dh) keys of all heads together."""
    return keys.float().abs().sum(dim=(1, 3))


def _quotas(chooses: Tensor, total: int) -> Tensor:
    """Return (B, P) how many of `total` each pivot takes: equal shares, the remainder to the first ones."""
    count = chooses.sum(dim=1, keepdim=True)
    number = chooses.cumsum(dim=1) - 1
    return (total // count + (number < total % count)) * chooses
