"""FastV in the first denoising step, kept in all later ones (Wan et al., Li Auto, arXiv 2601.20168; LLaDA-FastV).

In the first step the visual tokens are ranked before decoder layer K by the attention that they received in layer K-1,
A being the mean over heads, and layers K to the last run with the N_keep highest alone:

    last:  a_j = A_last,j             the prompt's last token
    mean:  a_j = 1/L sum_i A_ij       all tokens, since every token sees every other

All later steps run without the others from the first layer on. LLaDA-V aligns words and picture in middle and late
layers, so K lies there: half of the depth by default.

Differs: the abstract (the paper itself was not read) names neither the layer nor the tokens that rank; `last` is
FastV's released code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from espalier.methods.base import Need, Plan, Site, View
from espalier.methods.checks import layer_site, require
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.fastv import FastV
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class FastVFirstStep(DenoisingReducer):
    """Keeps, from the first step on, the visual tokens that receive the most attention there.

    Attributes:
        K: decoder layer of the first step before which tokens are dropped; None: half of the layers.
        queries: the tokens with attention that counts.
    """

    later_sites: ClassVar[int] = 1
    even = True  # the first step, too

    K: int | None = None
    queries: Literal["last", "mean"] = "last"

    takes_separators = True  # attention alone ranks

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.K is None or self.K >= 1, "K", self.K, "1 or more, null (half of the layers)")
        require(self.queries in FastV.signals, "queries", self.queries, ", ".join(FastV.signals))

    def ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share removed at each step, the same; the first step removes it at layer K alone."""
        return (ratio,) * steps

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the input of the decoder, where the first step keeps all, and the site before layer K."""
        return Site("prefix"), layer_site("K", depth // 2 if self.K is None else self.K, depth)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return what the first step kept, or the attention that layer K-1 pays to visual tokens."""
        return (Need("first_kept" if site.where == "prefix" else FastV.signals[self.queries]),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the `keep` highest. Cost: O(N log N) after the rows of attention that count: one, or all (`mean`)."""
        (need,) = self.needs(view.site)
        return Plan(top(view.signals[need.key].float(), keep))
