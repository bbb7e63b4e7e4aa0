"""FlowCut: "Rethinking Redundancy via Information Flow" (Tong et al., NeurIPS 2025, arXiv 2505.19536).

Acts inside the vision tower, after every second block. In each block, with A the attention of the class token, v the
values, both over the patches left, and means over heads h, a patch j gets

    R_j = mean_h A_hj,    V_j = mean_h softmax_j(v_h,class . v_hj),    both divided by their sum over patches
    s_j = (R_j + V_j) |mean_h v_hj|_1,    c_j <- c_j / 2 + s_j / 2

and the patches with the highest c stay. With N left, T in the end, and p blocks to go, a site removes

    (N - T) / sqrt(p) (1 - e^2),    e = the entropy of A over log N;    at the last site, p = 0, all but T

so that attention on few patches removes more. Sites are every second block up to the last but one that the projector
needs, of 24 blocks 2, 4, ... 22 (from 1).

Differs: followed is the released code (github.com/TungChintao/FlowCut, commit a2ecd247, and PyPI flowcut 1.0.2); the
paper's text was not compared. The code takes e anew from each block, the largest removal of a batch for all its
pictures. Here a count belongs to the budget and is the same for every sample: e is a hyper-parameter, `entropy`. It
decides who is left in between; how many stay at the end, and the c of those that last, do not depend on it. For
LLaVA-NeXT the code keeps half of the final count in each crop and prunes a second time, by the text, in decoder layer
1; this is left out, and crops share the budget by size. Towers without a class token have s_j = (attention received)
|mean v_j|_1, as the code for Qwen2-VL does; that model's own tower blends patches and is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class FlowCut(TokenReducer):
    """Drops, in every second block of the tower, the patches that little information flows to.

    Attributes:
        entropy: of the class token's attention over that of equal attention; lower removes more in early blocks.
    """

    entropy: float = 0.9

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(0 <= self.entropy <= 1, "entropy", self.entropy, "a number from 0 to 1")

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        """Return every second block, the last but one among them."""
        last = max(0, blocks - 2)
        return tuple(Site("tower", block) for block in range(last % 2, last + 1, 2))

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return no site: the method acts before the decoder."""
        del depth
        return ()

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return what each site leaves on the way to `share`."""
        stay, shares = 1.0, []
        for to_go in range(2 * n_sites - 2, 0, -2):
            stay -= (stay - share) / math.sqrt(to_go) * (1 - self.entropy**2)
            shares.append(stay)
        return (*shares, share)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the information flow, c."""
        del site
        return (Need("flow"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the highest. Cost: O(N log N) after O(N D) for a block's flow; without a class token O(N^2 D)."""
        scores = view.signals["flow"].float()
        return Plan(top(scores, keep), scores=scores)
