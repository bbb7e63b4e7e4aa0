"""Intervals of scores: of one run, of two on the same samples, of a table of benchmarks.

At the ceiling no answer may have changed, and resampling what was seen would leave no width. So every interval counts
beside the samples two that were not seen: for a difference and for retention one sample that broke and one that mended,
for a mean one at either end of the scale. Where nothing changed, the bound is then the rule of three: 3 / n.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from harness.stats.interval import Array, Interval, checked, is_binary, paired
from harness.stats.likelihood import bounds

#: Draws for an average over benchmarks.
RESAMPLES = 4000

#: Weights held at once while drawing, 40 MB.
BLOCK = 5_000_000


def mean_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """Return the mean of n scores and its interval.

    Scores that are all 0 or 1 get the exact binomial interval (Clopper and Pearson 1934), others that of the Bayesian
    bootstrap with one sample more at either end of the scale.

    Raises:
        ValueError: no scores, or scores that are not finite.
    """
    scores = checked(values)
    value = float(scores.mean())
    if is_binary(scores):
        test = stats.binomtest(int(scores.sum()), len(scores))
        exact = test.proportion_ci(confidence_level=level, method="exact")
        return Interval(value, float(exact.low), float(exact.high))
    return _interval(value, *of_mean(scores), level)


def difference_interval(ours: ArrayLike, theirs: ArrayLike, level: float = 0.95) -> Interval:
    """Return mean(ours) - mean(theirs) on the same samples with its paired interval.

    Raises:
        ValueError: the two are not of equal length, empty or not finite.
    """
    first, second = paired(ours, theirs)
    return _interval(float((first - second).mean()), *of_difference(first, second), level)


def retention_interval(ours: ArrayLike, full: ArrayLike, level: float = 0.95) -> Interval:
    """Return mean(ours) / mean(full), the share of the unpruned score kept, with its paired interval.

    Raises:
        ValueError: as `difference_interval`, or the unpruned mean is not above zero.
    """
    above, below = of_retention(ours, full)
    return _interval(_share(ours, full), above, below, level)


def average_retention(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]],
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the mean over benchmarks of the share kept, weighed anew within each: the Bayesian bootstrap by draws.

    Args:
        pairs: for each benchmark scores (ours, full) of the same samples.
        level: between 0 and 1.
        seed: of the draws.
        resamples: how many.

    Raises:
        ValueError: no benchmark, or as `retention_interval`.

    Cost: O(resamples n) for each benchmark of n samples.
    """
    if not pairs:
        raise ValueError("an average needs at least one benchmark")
    tables = [of_retention(*pair) for pair in pairs]
    value = fmean(_share(*pair) for pair in pairs)
    if any(len(checked(ours)) == 1 for ours, _ in pairs):
        return Interval(value, np.nan, np.nan)
    rng = np.random.default_rng(seed)
    drawn = np.mean([_drawn(*table, rng, resamples) for table in tables], axis=0)
    low, high = np.quantile(drawn, ((1 - level) / 2, (1 + level) / 2))
    return _around(value, float(low), float(high))


def _share(ours: ArrayLike, full: ArrayLike) -> float:
    first, second = paired(ours, full)
    return float(first.mean() / second.mean())


def _drawn(above: Array, below: Array, rng: np.random.Generator, resamples: int) -> Array:
    """Return draws of sum(g above) / sum(g below) under exponential weights."""
    table, many = np.stack([above, below], axis=1), max(1, BLOCK // len(above))
    parts = []
    for first in range(0, resamples, many):
        weights = rng.standard_exponential((min(many, resamples - first), len(above)))
        sums = weights @ table
        parts.append(sums[:, 0] / sums[:, 1])
    found: Array = np.concatenate(parts)
    return found


def of_mean(scores: Array) -> tuple[Array, Array]:
    """Return what is above and below the line of a mean, with a sample at either end of the scale."""
    return np.append(scores, _ends(scores)), np.ones(len(scores) + 2)


def of_difference(ours: Array, theirs: Array) -> tuple[Array, Array]:
    """Return what is above and below the line of a difference, with a sample that mended and one that broke."""
    reach = _reach(ours, theirs)
    return np.append(ours - theirs, (reach, -reach)), np.ones(len(ours) + 2)


def of_retention(ours: ArrayLike, full: ArrayLike) -> tuple[Array, Array]:
    """Return what is kept and what there was, with a sample that broke and one that mended.

    Raises:
        ValueError: as `retention_interval`.
    """
    first, second = paired(ours, full)
    if second.mean() <= 0:
        raise ValueError(
            f"retention is undefined: the unpruned mean is {second.mean():g}, not above zero"
        )
    reach = _reach(first, second)
    return np.append(first, (0.0, reach)), np.append(second, (reach, 0.0))


def _interval(value: float, above: Array, below: Array, level: float) -> Interval:
    if len(above) == 3:  # a single sample
        return Interval(value, np.nan, np.nan)
    return _around(value, *bounds(above, below, level))


def _around(value: float, low: float, high: float) -> Interval:
    # With a handful of samples those not seen may outweigh them.
    return Interval(value, min(low, value), max(high, value))


def _ends(*scores: Array) -> tuple[float, float]:
    """Return the ends of the scale: 0 and 1 where all scores are within, else the outermost ones and zero."""
    low = min(0.0, *(float(one.min()) for one in scores))
    high = max(0.0, *(float(one.max()) for one in scores))
    return (0.0, 1.0) if low == 0 and high <= 1 else (low, high)


def _reach(*scores: Array) -> float:
    """Return how much a sample's score may change."""
    low, high = _ends(*scores)
    return high - low
