"""FastV: "An Image is Worth 1/2 Tokens After Layer 2" (Chen et al., ECCV 2024, arXiv 2403.06764).

Before decoder layer K the visual tokens are ranked by the attention they received in layer K-1, mean over heads h,

    official (queries=last):  a_j = 1/H sum_h A_h[last, j]
    paper    (queries=mean):  a_j = 1/(H Q_j) sum_h sum_q A_h[q, j]   over the Q_j queries that can see token j

and the highest `keep` stay, in their order and with their position ids. The paper speaks of the attention from all
other tokens; the released code uses the row of the last prompt token alone, and its authors confirm this reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class FastV(TokenReducer):
    """Keeps the visual tokens that receive the most attention.

    Attributes:
        K: decoder layer before which tokens are dropped (layers 0..K-1 see all of them).
        queries: `last`, the last prompt token's attention counts, or `mean`, that of all queries.
    """

    K: int = 2
    queries: Literal["last", "mean"] = "last"

    takes_separators = True  # attention alone ranks
    #: What `queries` reads.
    signals: ClassVar[Mapping[str, str]] = {"last": "last_attention", "mean": "mean_attention"}

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.K >= 1, "K", self.K, "1 or more (the attention of layer K-1 is read)")
        require(self.queries in self.signals, "queries", self.queries, ", ".join(self.signals))

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer K."""
        return (layer_site("K", self.K, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the attention that layer K-1 pays to visual tokens."""
        del site
        return (Need(self.signals[self.queries]),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the `keep` highest. Cost: O(N log N) after the rows of attention that count: one, or all (`mean`)."""
        (need,) = self.needs(view.site)
        scores = view.signals[need.key].float()
        return Plan(top(scores, keep), scores=scores)
