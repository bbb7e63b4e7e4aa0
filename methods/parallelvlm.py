"""ParallelVLM (CVPR 2026, arXiv 2603.19610): draft and target side by side, from the prefill on.

Parallel prefill: the target, which keeps all m visual tokens V of the prompt, prefills. Its early layers choose what
the draft gets as soon as they are done, so that the draft's prefill runs while the target's other layers do:

    (4)  V* = TopK(dS), K = (1 - alpha) m, alpha = ratio
    (5)  V* = UV-Prune(M_p(V, X), alpha)

where dS, equation (3), is how far layers 1 to L move a token towards the words X (methods/uvprune.py). Both models must
cut a video into the same tokens; the draft embeds them itself.

Parallel decoding: the rounds of PEARL (methods/pearl.py), with the window of

    (6)  gamma = c* = T_p / T_q(alpha)

T_p and T_q being the measured times of one step of the target and of the pruned draft: pruning makes the draft faster,
and a faster draft proposes more tokens while the target verifies.

The other guidances are the paper's ablations: UV-Prune's criteria without variation, without similarity or without
both, a random and an even sample instead of the target's choice, a draft that prunes itself, and one that keeps all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from espalier.methods.base import Need, Site, TokenReducer, View
from espalier.methods.checks import require, require_choices
from espalier.methods.none import NoReduction
from espalier.methods.random import Random
from espalier.methods.uniform import Uniform
from espalier.methods.uvprune import Criterion, UVPrune
from espalier.methods.windows import AtOnce

Guidance = Literal[Criterion, "random", "uniform", "none", "self"]


@dataclass(frozen=True)
class ParallelVLM(AtOnce):
    """Drafts from what the target's early layers moved towards the words, while the target verifies.

    Attributes:
        gamma: tokens drafted in a round, or `auto`: as many as fit into one step of the target.
        L: layer of the target before which it chooses; None: 20, or a quarter of the depth where it ends before. Of
            the draft's own layers with guidance=self.
        guidance: what chooses: one of UV-Prune's criteria read in the target; `random` or `uniform`, which read
            nothing; `self`: the draft prunes itself by UV-Prune; `none`: it keeps everything.
        text_only: the draft sees no visual token at all, the paper's alpha = 1; goes with guidance=none.
    """

    L: int | None = None
    guidance: Guidance = "similarity_variation"
    text_only: bool = False

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require_choices(self, guidance=Guidance)
        blind = self.text_only and self.guidance != "none"
        require(not blind, "guidance", self.guidance, "none, where text_only=true leaves no choice")
        UVPrune(self.L)  # which checks L, read or not
        self._rule()  # some criteria have stricter bounds on L

    @property
    def draws(self) -> bool:
        """Whether it chooses at random."""
        return self._rule().draws

    @property
    def takes_separators(self) -> bool:
        """Whether the method that chooses for the draft takes them."""
        return (self.reducer or self._rule()).takes_separators

    @property
    def guided(self) -> bool:
        """Whether the target makes the choice."""
        return self.guidance not in ("none", "self")

    @property
    def reducer(self) -> TokenReducer | None:
        """UV-Prune in the draft's own layers, with guidance=self."""
        return UVPrune(self.L) if self.guidance == "self" else None

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer L, or the prefix where nothing is read."""
        return self._rule().sites(depth)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return what the criterion reads."""
        return self._rule().needs(site)

    def choose(self, view: View, keep: int) -> Tensor:
        """Keep the `keep` highest. Cost: O((N + T) D + N log N); by attention O(T N + N log N)."""
        return self._rule().plan(view, keep).kept

    def _rule(self) -> TokenReducer:
        """Return the method that chooses on the target's side."""
        if self.guidance == "none" or self.guidance == "self":
            return NoReduction()
        if self.guidance == "random":
            return Random()
        if self.guidance == "uniform":
            return Uniform()
        return UVPrune(self.L, self.guidance)
