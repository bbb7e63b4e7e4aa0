"""The theorems of ParallelVLM (CVPR 2026, arXiv 2603.19610) on speculative decoding, as printed.

A draft's forward takes T_q = t, a target's T_p = c t; gamma is the window. Speed-ups are over plain decoding. The paper
uses tau for two quantities: in Theorems 1, 4 and 5 it is accepted tokens of a window over gamma, in Lemma 1 and Theorem
6 the probability that a token is accepted. For comparison, `espalier.harness.decoding.speculative.renewal` has the
exact expectations.
"""

from __future__ import annotations

from espalier.harness.decoding.speculative.renewal import geometric


def sequential_ideal(c: float, gamma: float) -> float:
    """Return c (gamma + 1) / (gamma + c), Theorem 2: in turn, every token accepted."""
    return sequential(c, gamma, share=1.0)


def parallel_ideal(c: float, gamma: float) -> float:
    """Return c gamma / max(gamma, c), Theorem 3: at once, every token accepted; c at gamma = c."""
    return parallel(c, gamma, share=1.0)


def sequential(c: float, gamma: float, share: float) -> float:
    """Return c (tau gamma + 1) / (gamma + c), Theorem 4: in turn, `share` of a window accepted."""
    return c * (share * gamma + 1) / (gamma + c)


def sequential_of_length(c: float, gamma: float, length: float) -> float:
    """Return c M / (gamma + c): Theorem 4 with M = tau gamma + 1, the tokens of a round, as in Table 1."""
    return sequential(c, gamma, (length - 1) / gamma)


def parallel(c: float, gamma: float, share: float) -> float:
    """Return c tau gamma / max(gamma, c), Theorems 1 and 5: at once; tau c at gamma = c."""
    return c * share * gamma / max(gamma, c)


def accepted(acceptance: float, gamma: int) -> float:
    """Return a (1 - a^gamma) / (1 - a), Lemma 1: tokens of a window up to its first refusal, on average."""
    return acceptance * geometric(acceptance, gamma)


def parallel_rollback(c: float, gamma: int, acceptance: float) -> float:
    """Return c (1 + a^gamma) E[X] / (2 max(gamma, c)), Theorem 6: at once, refusals roll back.

    At gamma = c that is (a + a^2 + ... + a^(2 c)) / 2. The implemented chain yields a different number of tokens: see
    `renewal`.
    """
    tokens = (1 + acceptance**gamma) * accepted(acceptance, gamma)
    return c * tokens / (2 * max(gamma, c))
