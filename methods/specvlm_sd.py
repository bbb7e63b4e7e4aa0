"""SpecVLM (Ji et al., EMNLP 2025, arXiv 2508.16201): the target's attention chooses what the draft sees of a video.

Most of a long video is redundant for the draft, and its steps are expensive because its cache is long. So the target
reads the prompt first, and its attention decides what the draft gets: over all layers l, heads h and the words t after
the video, the template's end included,

    s_j = mean over l, h and t of A^l_h[t, j]

    stage I:  the tokens with the highest s_j until their sum reaches 0.4 of the total
    stage II: evenly spaced tokens of the others, up to the count

(methods/specvlm.py has both as a reducer). The draft's prefill waits for the end of the target's, since the last layer
counts too. Rounds are those of plain speculative decoding, with a chain of drafted tokens or with
the tree of methods/sd_tree.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from espalier.methods.base import Need, Site, View
from espalier.methods.checks import require, require_choices
from espalier.methods.sd_tree import EAGLE, depth_of, parents_of
from espalier.methods.specvlm import SpecVLM
from espalier.methods.windows import InTurn

Shape = Literal["chain", "tree"]


@dataclass(frozen=True)
class SpecVLMSD(InTurn):
    """Drafts from the tokens that the target's words attend to most and an even sample of the others.

    Attributes:
        gamma: tokens drafted in a round; of a tree its levels, which are five.
        mass: share of the attention that stage I covers.
        shape: what is drafted, a `chain` or EAGLE's static `tree`.
    """

    mass: float = 0.4
    shape: Shape = "chain"

    takes_separators = True  # attention alone ranks
    guided = True  # the target chooses what the draft sees

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(0 <= self.mass <= 1, "mass", self.mass, "a number from 0 to 1")
        require_choices(self, shape=Shape)
        levels = depth_of(EAGLE)
        fits = self.shape == "chain" or self.gamma == levels
        require(fits, "gamma", self.gamma, f"{levels}, the levels of the tree (shape=tree)")

    @property
    def tree(self) -> tuple[int, ...]:
        """Parents of EAGLE's 25 nodes; empty for a chain."""
        return parents_of(EAGLE) if self.shape == "tree" else ()

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the place after the last layer: all layers count."""
        return (Site("layer", depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the words' attention in every layer, and where words and tokens stand."""
        return self._rule(site).needs(site)

    def choose(self, view: View, keep: int) -> Tensor:
        """Choose by both stages. Cost: O(L T N + N log N), L layers, T words."""
        return self._rule(view.site).plan(view, keep).kept

    def _rule(self, site: Site) -> SpecVLM:
        return SpecVLM(layer=site.layer, mass=self.mass)
