"""Expected speed of speculative decoding if every drafted token is accepted with the same probability.

T_p and T_q are the times of one step of target and draft, a the acceptance, gamma the window. ParallelVLM (arXiv
2603.19610) gives bounds; these are the exact expectations of the two-state chain of parallel decoding.
"""

from __future__ import annotations

import math


def check(acceptance: float, gamma: int) -> None:
    """Raise ValueError for an acceptance outside [0, 1] or a window below 1."""
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance {acceptance} is not in [0, 1]")
    if gamma < 1:
        raise ValueError(f"gamma {gamma} is below 1")


def geometric(acceptance: float, terms: int) -> float:
    """Return 1 + a + ... + a^(terms - 1)."""
    return float(terms) if acceptance == 1 else (1 - acceptance**terms) / (1 - acceptance)


def parallel_tokens(acceptance: float, gamma: int) -> float:
    """Return the expected verified tokens per round of parallel decoding.

    After a refusal a round judges one token (one token verified, accepted or not); after a clean round it judges gamma
    (1 + a + ... + a^(gamma-1) verified on average), and is clean with probability a^gamma. The result is weighted by
    the frequency of both states.
    """
    check(acceptance, gamma)
    return geometric(acceptance, gamma) / (1 + acceptance - acceptance**gamma)


def sequential_tokens(acceptance: float, gamma: int) -> float:
    """Return the tokens of a round of drafting, then verifying: 1 + a + ... + a^gamma, including the target's own."""
    check(acceptance, gamma)
    return geometric(acceptance, gamma + 1)


def parallel_speedup(acceptance: float, gamma: int, target: float, draft: float) -> float:
    """Return the speed-up of parallel decoding over the target alone; `target` and `draft` are times of a step."""
    return parallel_tokens(acceptance, gamma) * target / max(gamma * draft, target)


def best_window(acceptance: float, target: float, draft: float) -> int:
    """Return the window with the highest gain of parallel decoding, the smallest among equals.

    Beyond ceil(target / draft) a round only takes longer. If every token is accepted, that is the window; if few are, a
    round should end as soon as the target's forward does.
    """
    windows = range(1, math.ceil(target / draft) + 1)
    return max(windows, key=lambda gamma: parallel_speedup(acceptance, gamma, target, draft))


def sequential_speedup(acceptance: float, gamma: int, target: float, draft: float) -> float:
    """Return the speed-up of drafting, then verifying, over the target alone."""
    return sequential_tokens(acceptance, gamma) * target / (gamma * draft + target)
