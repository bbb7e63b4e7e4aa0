"""Top-p: a count for each sample, by the mass of attention, as in ZipVL (He et al., 2024, arXiv 2410.08584).

Each sample keeps the fewest visual tokens that hold a share p of the attention, up to the budget. Tokens leave before
decoder layer K, ranked as in FastV by the attention a_j that the last prompt token pays to them in layer K-1, mean over
heads:

    k = min {k : a_(1) + ... + a_(k) >= p (a_1 + ... + a_N)},   at most the budget's count.

p=1 keeps the budget's count in every sample and is FastV. Where the budget keeps all N tokens, nothing is dropped.

Differs: ZipVL chooses the important tokens of a layer by such a share, and Twilight (Lin et al., arXiv 2502.02770) the
keys of a head; both choose anew in every layer, where tokens leave for good here.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Need, Plan, Site, View
from espalier.methods.capped import CappedReducer
from espalier.methods.checks import layer_site, read, require
from espalier.methods.select.topk import ranking


@dataclass(frozen=True)
class TopP(CappedReducer):
    """Keeps the visual tokens that hold a share of the attention.

    Attributes:
        K: decoder layer before which tokens are dropped (layers 0..K-1 see all of them).
        p: share of the attention that the kept tokens hold, unless the budget allows fewer.
    """

    K: int = 2
    p: float = 0.9

    takes_separators = True  # attention alone ranks

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.K >= 1, "K", self.K, "1 or more (the attention of layer K-1 is read)")
        require(0 < self.p <= 1, "p", self.p, "a number above 0, at most 1")

    @property
    def adaptive(self) -> bool:
        """Whether samples differ in their counts."""
        return self.p < 1

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer K."""
        return (layer_site("K", self.K, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the attention of layer K-1."""
        del site
        return (Need("last_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the highest that hold the share. Cost: O(N log N); one wait for the device, for the count."""
        scores = view.signals["last_attention"].double()
        order = ranking(scores)
        if self.adaptive and keep < scores.shape[1]:
            mass = scores.gather(1, order).cumsum(dim=1)
            (before,) = read((mass < self.p * mass[:, -1:]).sum(dim=1).max())
            keep = min(keep, int(before) + 1)
        return Plan(order[:, :keep].sort(dim=1).values)
