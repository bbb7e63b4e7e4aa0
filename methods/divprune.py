"""DivPrune: "Diversity-based Visual Token Pruning for LMMs" (Alvar et al., CVPR 2025, arXiv 2503.02175).

The kept set S of the projected tokens greedily maximises the smallest distance between its members (max-min
diversity):

    d(i, j) = 1 - cos(x_i, x_j),    first: argmax_i min_{j != i} d(i, j),    next: argmax_i min_{j in S} d(i, j)

Kept tokens stay in their order.

Differs: where the released code can return a token twice (all remaining tokens duplicate kept ones), a kept token is
never picked again here.

Differs: on models that end each row of crops with a newline token (LLaVA-NeXT, LLaVA-OneVision) the released code runs
over the whole visual sequence: newlines are candidates, may displace patches, and count as kept. Here they are always
kept, are not candidates and do not count: of LLaVA-NeXT's 2,880 patches and 48 newlines, a share of 0.098 is 287 tokens
in the released code, and 282 patches plus the 48 newlines here; with engine.separators=candidates it is 287 here as
well. In a row, `tokens.positions` counts newlines in either case, and `tokens.visual` where they are candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.checks import early_site
from espalier.methods.select.cosines import cosines
from espalier.methods.select.maxmin import farthest_first


@dataclass(frozen=True)
class DivPrune(TokenReducer):
    """Keeps tokens that are as dissimilar to each other as possible.

    Attributes:
        layer: decoder layer before which tokens go; 0, before the decoder, is the paper's place.
    """

    layer: int = 0

    takes_separators = True  # projected tokens are compared, as in the released code

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix, or the site before `layer`."""
        return (early_site(self.layer, depth),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep a max-min diverse set. Cost: O(N^2 D / 2) for the similarities, then `keep` steps of O(N).

        Where N^2 numbers do not fit the memory, a step takes O(N D).
        """
        return Plan(farthest_first(cosines(view.tokens), keep))
