"""The "FLOPs" that each paper prints for a prefill: decoder layers alone, full-width keys, every pair of tokens.

Of a layer on n tokens, width d, MLP width m (of all experts that one token goes through, m_0 in layer 0 if it differs):

| paper      | one layer                   | equations    | counts                                               |
| ---------- | --------------------------- | ------------ | ---------------------------------------------------- |
| `d2pruner` | 4 n d^2 + 2 n^2 d + 2 n d m | of FastV     | multiply-adds, a two-matrix MLP (arXiv 2403.06764)   |
| `d3tom`    | 4 n d^2 + 2 n^2 d + 3 n d m | (13), (22)   | multiply-adds, a three-matrix MLP                    |
| `rtprune`  | 8 n d^2 + 4 n^2 d + 6 n d m | (20) to (24) | two FLOPs a multiply-add; m_0 dense, m = k m_e + m_s |

Routers are never counted, grouped keys are counted as if they were not grouped, and masked pairs are counted. The two
other papers print no FLOPs: AirCache does not change the prefill, and ParallelVLM measures times. For the exact count
see `espalier.harness.cost.flops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
