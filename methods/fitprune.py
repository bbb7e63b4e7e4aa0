"""FitPrune: "Fit and Prune: Fast and Training-free Visual Token Pruning" (Ye et al., AAAI 2025, arXiv 2409.10197).

Every decoder layer drops tokens by its own attention. With M = max over heads of A_h, n_t words after the image and n
remaining visual tokens,

    c_j = 1/n_t sum over words q of M[q, j],    s_j = 1/n sum over visual q of M[q, j],    score c_j s_j

The number of tokens that each layer drops is fitted beforehand (harness/tools/calibration/fitprune_fit.py). For an
alpha from 0 to 1 a layer may lose the largest set that leaves the share 1 - alpha of both unpruned sums: the
intersection of the longest admissible prefixes of the tokens in ascending order of c and of s. The mean remaining share
after each layer, over images, is one row of `scheme`; a budget lies between two rows.

Differs: the paper drops inside layer l, between attention and feed-forward. Nothing dropped comes back, and the
feed-forward works token by token, so dropping before layer l + 1 gives the same outputs; only the feed-forward of layer
l on its own dropped tokens is not saved. Hence a site before every layer but the first; what the last layer drops
changes nothing.

Differs: paper and released code select alike. They differ in the fit: the code has tables of token counts for
LLaVA-1.5, fitted with the last alpha that its bisection tried, whether it reached the target or not; here alpha is the
smallest that does.

As published, s is not corrected for the causal mask: early tokens are seen by more visual queries, which favours them.

The method needs the attention maps of all visual queries in every layer. They are summed block by block, which takes
considerable time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from espalier.methods.base import MethodError, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require
from espalier.methods.select.topk import top
from espalier.methods.select.words import words_after


@dataclass(frozen=True)
class FitPrune(TokenReducer):
    """Drops in every layer the tokens that neither words nor image attend to, as many as a fitted scheme gives.

    Attributes:
        scheme: shares of the visual tokens left after each site; one row for each of the evenly spaced alphas between 0
            (all are left) and 1 (none), ascending. Empty: the rows that were fitted to the model.
    """

    scheme: tuple[tuple[float, ...], ...] = ()

    takes_separators = True  # attention alone ranks

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        above: tuple[float, ...] = (1.0,) * len(self.scheme[0]) if self.scheme else ()
        for number, row in enumerate(self.scheme):
            falls = all(1 >= a >= b >= 0 for a, b in pairwise((1.0, *row)))
            fits = len(row) == len(above) and all(a >= b for a, b in zip(above, row, strict=True))
            valid = "shares from 0 to 1 that never rise from site to site nor from row to row"
            require(bool(row) and falls and fits, f"scheme[{number}]", list(row), valid)
            above = row

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites before every layer but the first."""
        if self.scheme:
            width = len(self.scheme[0])
            valid = f"{depth - 1} shares (the model has {depth} decoder layers)"
            require(width == depth - 1, "scheme[0]", list(self.scheme[0]), valid)
        return tuple(Site("layer", layer) for layer in range(1, depth))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return the scheme of alpha = 1 - share, linear between the rows.

        Raises:
            MethodError: there is no scheme.
        """
        if not self.scheme:
            raise MethodError(
                "method.params.scheme=() must be fitted to the model (python -m espalier calibrate); "
                "valid: one row or more"
            )
        rows = ((0.0,) * n_sites, *reversed(self.scheme), (1.0,) * n_sites)
        place = share * (len(rows) - 1)
        below = min(math.floor(place), len(rows) - 2)
        weight = place - below
        pairs = zip(rows[below], rows[below + 1], strict=True)
        return tuple((1 - weight) * low + weight * high for low, high in pairs)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return both attentions in the layer before the site, and the positions of the words."""
        places = ("text_positions", "visual_positions") if site.layer == 1 else ()
        return tuple(map(Need, ("text_received_max", "visual_received_max", *places)))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the highest c_j s_j. Cost: O(N log N) after the attention of all N visual tokens and T words."""
        from_words, from_image = attentions(view)
        scores = from_words * from_image
        return Plan(top(scores, keep), scores=scores)


def attentions(view: View) -> tuple[Tensor, Tensor]:
    """Return c and s, (B, N) each, in fp32.

    Raises:
        MethodError: a prompt has no words after the image.
    """
    signals = view.signals
    if "text_positions" in signals:
        words_after(signals["text_positions"], signals["visual_positions"])
    return signals["text_received_max"].float(), signals["visual_received_max"].float()
