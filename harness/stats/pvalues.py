"""Tests of two runs on the same samples, and the correction for several tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from espalier.harness.stats.interval import BLOCK, Array, is_binary, paired

#: Number of swaps drawn if there are more; the smallest p-value is then 0.0001, so that 500 tests fit a table.
RESAMPLES = 9999
SMALLEST = 1 / (RESAMPLES + 1)


def paired_pvalue(ours: ArrayLike, theirs: ArrayLike) -> float:
    """Return the two-sided p-value of two runs: McNemar's exact test for binary scores, else the permutation test.

    Raises:
        ValueError: the two are not of equal length, empty or not finite.
    """
    first, second = paired(ours, theirs)
    if is_binary(first, second):
        return mcnemar_pvalue(int((first < second).sum()), int((first > second).sum()))
    return permutation_pvalue(first, second)


def mcnemar_pvalue(broke: int, mended: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, from the numbers of answers that changed either way.

    Raises:
        ValueError: a count is negative.
    """
    if min(broke, mended) < 0:
        raise ValueError(f"counts must be at least 0, got {broke} and {mended}")
    return 1.0 if broke + mended == 0 else float(stats.binomtest(broke, broke + mended, 0.5).pvalue)


def mcnemar_midp(broke: int, mended: int) -> float:
    """Return the two-sided mid-p value of McNemar's test: observed counts have half their weight in the exact one.

    Its rate of false alarms is close to the level, where that of the exact test is far below for few changed answers;
    it may be slightly above.

    Raises:
        ValueError: a count is negative.
    """
    exact, changed = mcnemar_pvalue(broke, mended), broke + mended
    if not changed:
        return exact
    # Equal counts are observed in one place, others in both tails.
    halves = 0.5 if broke == mended else 1.0
    return exact - halves * float(stats.binom.pmf(min(broke, mended), changed, 0.5))


def permutation_pvalue(
    ours: ArrayLike, theirs: ArrayLike, seed: int = 0, resamples: int = RESAMPLES
) -> float:
    """Return the two-sided p-value of the paired permutation test on the difference of means.

    Under the null hypothesis the two scores of a sample may be swapped (Fisher's sign-flip test).
    Exact when the number of distinct swaps is at most `resamples`, otherwise Monte Carlo with
    1 / (resamples + 1) as its smallest value.

    Raises:
        ValueError: as `paired_pvalue`.
    """
    first, second = paired(ours, theirs)
    # Samples on which both agree cannot move the statistic; without them more tests are exact.
    gaps = (first - second)[first != second]
    observed = abs(float(gaps.sum())) * (
        1 - 1e-12
    )  # sums of the same numbers in another order count as equal
    exact = 2 ** min(len(gaps), 60) <= resamples
    if exact:
        swaps = np.arange(2 ** len(gaps))[:, None] >> np.arange(len(gaps)) & 1
        return float((_moved(swaps, gaps) >= observed).mean())
    rng, beyond, block = np.random.default_rng(seed), 0, max(1, BLOCK // len(gaps))
    for begin in range(0, resamples, block):
        rows = min(block, resamples - begin)
        bits = np.frombuffer(rng.bytes(rows * -(-len(gaps) // 8)), dtype=np.uint8)
        drawn = np.unpackbits(bits.reshape(rows, -1), axis=1, count=len(gaps))
        beyond += int((_moved(drawn, gaps) >= observed).sum())
    return (beyond + 1) / (resamples + 1)


def _moved(swaps: NDArray[np.integer], gaps: Array) -> Array:
    """Return the absolute sum of gaps, with the sign of swapped ones reversed."""
    return cast("Array", np.abs(gaps.sum() - 2 * (swaps.astype(np.float64) @ gaps)))


def holm(pvalues: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests (Holm 1979), in their order.

    The k-th smallest of m is multiplied by m - k + 1, and is not less than those before it. At most one in twenty
    tables with marks below 0.05 has a mark by chance, whatever the dependence of its tests.

    Raises:
        ValueError: a value is not a probability.
    """
    values = np.asarray(pvalues, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("p-values must be between 0 and 1")
    order = np.argsort(values, kind="stable")
    steps = values[order] * np.arange(len(values), 0, -1)
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return [float(value) for value in corrected]
