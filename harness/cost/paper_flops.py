"""The "FLOPs" that each paper prints, for a prefill and for D3ToM's denoising run.

A prefill counts decoder layers alone, full-width keys, every pair of tokens. Of a layer on n tokens, width d, MLP width
m (of all experts that one token goes through, m_0 in layer 0 if it differs):

| paper      | one layer                   | equations    | counts                                               |
| ---------- | --------------------------- | ------------ | ---------------------------------------------------- |
| `d2pruner` | 4 n d^2 + 2 n^2 d + 2 n d m | of FastV     | multiply-adds, a two-matrix MLP (arXiv 2403.06764)   |
| `d3tom`    | 4 n d^2 + 2 n^2 d + 3 n d m | (13), (22)   | multiply-adds, a three-matrix MLP                    |
| `rtprune`  | 8 n d^2 + 4 n^2 d + 6 n d m | (20) to (24) | two FLOPs a multiply-add; m_0 dense, m = k m_e + m_s |

Routers are never counted, grouped keys are counted as if they were not grouped, and masked pairs are counted. The two
other papers print no FLOPs: AirCache does not change the prefill, and ParallelVLM measures times. For the exact count
see `espalier.harness.cost.flops`.

The D3ToM paper's own count of a denoising run (AAAI 2026, arXiv 2511.12280, equations 12 to 26).

Its "FLOPs" are MULTIPLY-ADDS of the decoder layers alone, full-width keys, three-matrix MLP, every pair of tokens:

    C(n) = 4 n d^2 + 2 n^2 d + 3 n d m                                                          (13), (22)

Visual tokens are counted as fractions, as in the printed figures. A run is a sum over its T steps; the first keeps all
tokens for methods that need deciders, and for FastV, but not for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from espalier.harness.cost.facts import StackFacts


def attention_macs(hidden: int, tokens: float, keys: float | None = None) -> float:
    """Return 4 n d^2 + 2 n k d, the multiply-adds of one layer's attention; k is n unless other keys were cached."""
    return 4 * tokens * hidden**2 + 2 * tokens * (tokens if keys is None else keys) * hidden


def mlp_macs(hidden: int, intermediate: int, tokens: float, matrices: int) -> float:
    """Return the multiply-adds of one layer's MLP."""
    return matrices * tokens * hidden * intermediate


#: For each layer: tokens that enter it, words included, or keys that they attend to.
Counts = Sequence[float]


def d2pruner(stack: StackFacts, tokens: Counts, keys: Counts | None = None) -> float:
    """Return the count of D2Pruner (arXiv 2512.19443, Table 4) and FastV."""
    return _macs(stack, tokens, keys, matrices=2)


def d3tom(stack: StackFacts, tokens: Counts, keys: Counts | None = None) -> float:
    """Return the count of D3ToM (arXiv 2511.12280, equations 13 and 22) for one forward pass."""
    return _macs(stack, tokens, keys, matrices=3)


def rtprune(stack: StackFacts, tokens: Counts, keys: Counts | None = None) -> float:
    """Return the count of RTPrune (arXiv 2605.00392, equations 20 to 25); layer 0 has its own width."""
    total = 0.0
    for layer, (n, key_count) in enumerate(_pairs(tokens, keys)):
        dense_width = stack.first_intermediate if layer == 0 else None
        width = stack.intermediate if dense_width is None else dense_width
        macs = attention_macs(stack.hidden, n, key_count) + mlp_macs(stack.hidden, width, n, 3)
        total += 2 * macs
    return total


def _macs(stack: StackFacts, tokens: Counts, keys: Counts | None, matrices: int) -> float:
    hidden, width = stack.hidden, stack.intermediate
    return sum(
        attention_macs(hidden, n, key_count) + mlp_macs(hidden, width, n, matrices)
        for n, key_count in _pairs(tokens, keys)
    )


def _pairs(tokens: Counts, keys: Counts | None) -> list[tuple[float, float]]:
    return list(zip(tokens, tokens if keys is None else keys, strict=True))


def split_layer(stack: StackFacts, visual: float, kept: float) -> float:
    """Return what D3ToM's (15) and (16) add to C(n) of the layer inside which tokens merge; usually below 0.

    Its MLP sees only the `kept` visual tokens, and each of the others is compared with each of those.
    """
    dropped = visual - kept
    return 2 * dropped * kept * stack.hidden - mlp_macs(
        stack.hidden, stack.intermediate, dropped, 3
    )


def counts_of(stack: StackFacts, tokens: Counts, keys: Counts | None = None) -> dict[str, float]:
    """Return every paper's count of one forward pass, by the name of the paper's method.

    Args:
        stack: the decoder.
        tokens: entering each layer, words included.
        keys: attended to in each layer, including their own; None: only their own. No paper counts a cache, so this is
            its formula with n^2 read as queries times keys.
    """
    return {name: count(stack, tokens, keys) for name, count in PAPERS.items()}


#: The papers that print FLOPs, by their method's name.
PAPERS: Mapping[str, Callable[[StackFacts, Counts, Counts | None], float]] = {
    "d2pruner": d2pruner,
    "d3tom": d3tom,
    "rtprune": rtprune,
}


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
