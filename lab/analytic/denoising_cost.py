"""The D3ToM paper's own count of a denoising run (AAAI 2026, arXiv 2511.12280, equations 12 to 26).

Its "FLOPs" are MULTIPLY-ADDS of the decoder layers alone, full-width keys, three-matrix MLP, every pair of tokens:

    C(n) = 4 n d^2 + 2 n^2 d + 3 n d m                                                          (13), (22)

Visual tokens are counted as fractions, as in the printed figures. A run is a sum over its T steps; the first keeps all
tokens for methods that need deciders, and for FastV, but not for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.harness.cost.flops import attention_macs, mlp_macs


def even(ratio: float, steps: int) -> tuple[float, ...]:
    """Return D3ToM's share at each step: none at the first, which has no deciders, then a constant."""
    return (0.0, *(ratio,) * (steps - 1))


def rising(ratio: float, steps: int) -> tuple[float, ...]:
    """Return D3ToM-t's (11): from 2 r - 1 to 1 in equal increments over the steps that merge, with mean r >= 1/2."""
    return (0.0, *(2 * ratio - 1 + 2 * (1 - ratio) * u / (steps - 2) for u in range(steps - 1)))


@dataclass(frozen=True)
class DenoisingCost:
    """One model and one answer.

    Attributes:
        hidden: d.
        intermediate: m.
        layers: L.
        steps: T.
        visual: N_v, visual tokens.
        text: N_p + N_g, tokens of prompt and answer.
    """

    hidden: int
    intermediate: int
    layers: int
    steps: int
    visual: float
    text: float

    def layer(self, visual: float) -> float:
        """Return C(n) of one layer on `visual` visual tokens and the text."""
        return self._attention(visual) + self._mlp(visual)

    def unreduced(self) -> float:
        """Return the cost of a run that keeps every token (14), (23)."""
        return self.steps * self._step()

    def merging(self, ratios: Sequence[float], K: int) -> float:
        """Return the cost of D3ToM (15) to (17): inside layer K the attention sees all tokens, the MLP only the kept.

        Args:
            ratios: share merged at each step; 0 keeps every token.
            K: layer in which tokens merge.
        """
        return sum(self._merging_step(ratio, K) if ratio else self._step() for ratio in ratios)

    def pruning(self, ratio: float, K: int) -> float:
        """Return the cost of FastV (24): the share `ratio` is removed before layer K, except in the first step."""
        kept = (1 - ratio) * self.visual
        step = K * self.layer(self.visual) + (self.layers - K) * self.layer(kept)
        return self._step() + (self.steps - 1) * step

    def pyramid(self, ratio: float, stages: int = 4, excess: float = 1.5) -> float:
        """Return the cost of PyramidDrop (25): each of equal stages keeps the share 1.5 (1 - ratio) of the last."""
        share = excess * (1 - ratio)
        per_stage = [self.layer(share**stage * self.visual) for stage in range(stages)]
        return self.steps * self.layers / stages * sum(per_stage)

    def before(self, ratio: float) -> float:
        """Return the cost of VisionZip (26): the share `ratio` is removed before the decoder, at every step."""
        return self.steps * self.layers * self.layer((1 - ratio) * self.visual)

    def _step(self) -> float:
        return self.layers * self.layer(self.visual)

    def _merging_step(self, ratio: float, K: int) -> float:
        kept = (1 - ratio) * self.visual
        split = self._attention(self.visual) + self._mlp(kept)
        similarities = 2 * ratio * self.visual * kept * self.hidden  # (15)
        later_layers = (self.layers - K - 1) * self.layer(kept)
        return K * self.layer(self.visual) + split + later_layers + similarities

    def _attention(self, visual: float) -> float:
        return attention_macs(self.hidden, visual + self.text)

    def _mlp(self, visual: float) -> float:
        return mlp_macs(self.hidden, self.intermediate, visual + self.text, matrices=3)
