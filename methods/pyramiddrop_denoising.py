"""PyramidDrop while an answer is denoised, as D3ToM is compared with it (AAAI 2026, arXiv 2511.12280, appendix B.4).

At every denoising step, the first one included, the decoder is cut into S equal stages. At the end of each but the last
(layers 7, 15 and 23 of 32) the visual tokens are ranked by the attention that the prompt's last token pays them there,
mean over heads, and the share x of them stays:

    a_j = A_last,j,    V_s = x^s N,    s = 0 .. S-1,    x = excess (1 - r)            (25)

So the ratio r sets the share of one stage. The appendix calls it the average reduction; it is neither that,
1 - (1 + x + .. + x^(S-1)) / S, nor the reduction in the last stage, 1 - x^(S-1): at r = 0.9 they are 0.706 and 0.997.
Rows record the achieved shares (`extra.achieved`). r must be above 1 - 1 / excess, where x is 1; r = 0 drops nothing.
For an exact mean use `pyramiddrop` with budget=average, which acts at every step as well.

Differs: the appendix does not name the ranking attention; here it is PyramidDrop's own, which needs no token of the
answer, so that the first step can drop tokens as its count (25) requires.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import MethodError, Need, Plan, Site, View
from espalier.methods.checks import require
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.select.topk import top
from espalier.methods.stages import Stages


@dataclass(frozen=True)
class PyramidDropDenoising(DenoisingReducer, Stages):
    """Keeps, stage by stage and step by step, the tokens that the prompt's last token attends to most.

    Attributes:
        S: number of stages.
        excess: share that a stage keeps of the one before it, divided by 1 - ratio.
    """

    S: int = 4
    excess: float = 1.5

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.S >= 2, "S", self.S, "2 or more (tokens go between stages)")
        require(self.excess > 0, "excess", self.excess, "a number above 0")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites between the stages."""
        valid = f"2 to {depth} (the model has {depth} decoder layers)"
        require(depth >= self.S, "S", self.S, valid)
        return tuple(Site("layer", stage * depth // self.S) for stage in range(1, self.S))

    def ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share removed in the last stage, 1 - x^(S-1), the same at every step.

        Raises:
            MethodError: x is 1 or more, so that no stage would drop anything.
        """
        share = self.excess * (1 - ratio)
        if ratio == 0:
            return (0.0,) * steps
        if share >= 1:
            raise MethodError(
                f"ratio={ratio:g} leaves each stage {share:.4g} times the tokens of the one before; valid with "
                f"method.params.excess={self.excess:g}: 0, or {1 - 1 / self.excess:.4g} < ratio < 1"
            )
        return (1 - share ** (self.S - 1),) * steps

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the last prompt token's attention in the layer that ends the stage."""
        del site
        return (Need("last_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the highest. Cost: O(N log N) after one row of attention a stage."""
        return Plan(top(view.signals["last_attention"].float(), keep))
