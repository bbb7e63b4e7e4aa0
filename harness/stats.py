"""Intervals and tests for scores of samples: exact where possible, otherwise resampling.

Everything is scipy's. Methods are compared on the same samples, so differences and ratios resample
pairs; treating the two runs as independent would give intervals that are too wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

#: Resamples unless the caller says otherwise; the usual choice for 95 % percentile intervals.
RESAMPLES = 9999

#: Numbers held at once while resampling, about 80 MB of float64 with its indices.
BLOCK = 5_000_000

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; `low` and `high` are NaN if one sample says all."""

    value: float
    low: float
    high: float


def by_unit(values: Array, units: Sequence[Hashable]) -> Array:
    """Return one value for each unit, so that the mean stays and units are independent; order of first appearance.

    Where every sample is a unit of its own, the values come back as they are. A unit's value is the mean of all plus
    what its members deviate from it, times units over samples: the linear form of a ratio whose units differ in size.
    """
    place = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    if len(place) == len(values):
        return values
    mean = values.mean()
    sums = np.bincount([place[unit] for unit in units], weights=values - mean)
    found: Array = mean + sums * (len(place) / len(values))
    return found


def mean_interval(
    values: ArrayLike, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Return the mean of n scores and its interval.

    Scores that are all 0 or 1 get the exact binomial interval (Clopper and Pearson 1934), others
    the percentile bootstrap over samples. Cost: O(n), or O(resamples n).

    Raises:
        ValueError: no scores, or scores that are not finite.
    """
    scores = _scores(values)
    value = float(scores.mean())
    if np.isin(scores, (0.0, 1.0)).all():
        test = stats.binomtest(int(scores.sum()), len(scores))
        exact = test.proportion_ci(confidence_level=level, method="exact")
        return Interval(value, float(exact.low), float(exact.high))
    return _bootstrap((scores,), np.mean, value, level, seed, resamples)


def difference_interval(
    ours: ArrayLike,
    theirs: ArrayLike,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return mean(ours) - mean(theirs) on the same samples with its paired bootstrap interval.

    Raises:
        ValueError: the two are not of equal length, empty or not finite.
    """
    first, second = _pair(ours, theirs)
    gaps = first - second
    return _bootstrap((gaps,), np.mean, float(gaps.mean()), level, seed, resamples)


def retention_interval(
    ours: ArrayLike,
    full: ArrayLike,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return mean(ours) / mean(full), the share of the unpruned score kept, with paired bootstrap.

    Raises:
        ValueError: as `difference_interval`, or the unpruned mean is zero.
    """
    first, second = _pair(ours, full)
    if second.mean() == 0:
        raise ValueError("retention is undefined: the unpruned mean is zero")
    value = float(first.mean() / second.mean())
    return _bootstrap((first, second), _ratio, value, level, seed, resamples)


def rate_ratio_interval(
    samples: Sequence[Sequence[float]],
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return (sum(a) / sum(b)) / (sum(c) / sum(d)) over samples (a, b, c, d) with its paired bootstrap interval.

    Raises:
        ValueError: no samples, samples of another length, or numbers that are not finite and above 0.
    """
    table = np.asarray(samples, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != 4 or not len(table):
        raise ValueError(
            f"samples must be a non-empty list of four numbers each, got {table.shape}"
        )
    if not (np.isfinite(table) & (table > 0)).all():
        raise ValueError("samples must be finite and above 0")
    data = tuple(table.T)
    return _bootstrap(data, _rates, float(_rates(*data)), level, seed, resamples)


def ratio_interval(ours: ArrayLike, theirs: ArrayLike, level: float = 0.95) -> Interval:
    """Return the geometric mean of ours / theirs, pair by pair, with Student's interval on the logarithms.

    For times taken in turns: pairs are few, and resampling four of them would give intervals that are too narrow.

    Raises:
        ValueError: as `difference_interval`, or a value is not above zero.
    """
    first, second = _pair(ours, theirs)
    if min(first.min(), second.min()) <= 0:
        raise ValueError("ratios need values above zero")
    logs = np.log(first / second)
    middle, n = float(logs.mean()), len(logs)
    if n == 1:
        return Interval(math.exp(middle), math.nan, math.nan)
    half = float(stats.t.ppf((1 + level) / 2, n - 1) * logs.std(ddof=1)) / math.sqrt(n)
    return Interval(*map(math.exp, (middle, middle - half, middle + half)))


def permutation_pvalue(
    ours: ArrayLike, theirs: ArrayLike, seed: int = 0, resamples: int = RESAMPLES
) -> float:
    """Return the two-sided p-value of the paired permutation test on the difference of means.

    Under the null hypothesis the two scores of a sample may be swapped (Fisher's sign-flip test).
    Exact when the number of distinct swaps is at most `resamples`, otherwise Monte Carlo, whose
    smallest value is 1 / (resamples + 1).

    Raises:
        ValueError: as `difference_interval`.
    """
    first, second = _pair(ours, theirs)
    # Samples on which both agree cannot move the statistic; without them more tests are exact.
    gaps = (first - second)[first != second]
    if len(gaps) < 2:  # Both signs of a single gap are equally extreme.
        return 1.0
    test = stats.permutation_test(
        (gaps,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, BLOCK // len(gaps)),
        rng=np.random.default_rng(seed),
    )
    return float(test.pvalue)


def mcnemar_pvalue(broke: int, mended: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: of answers that changed sides, as many either way.

    Raises:
        ValueError: a count is negative.
    """
    if min(broke, mended) < 0:
        raise ValueError(f"counts must be at least 0, got {broke} and {mended}")
    if broke + mended == 0:
        return 1.0
    return float(stats.binomtest(broke, broke + mended, 0.5).pvalue)


def _bootstrap(
    data: Sequence[Array],
    statistic: Callable[..., object],
    value: float,
    level: float,
    seed: int,
    resamples: int,
) -> Interval:
    n = len(data[0])
    if n == 1:
        return Interval(value, math.nan, math.nan)
    # Resamples are drawn here with an explicit block size; memory stays bounded for large n.
    found = stats.bootstrap(
        data,
        statistic,
        n_resamples=resamples,
        batch=max(1, BLOCK // n),
        vectorized=True,
        paired=len(data) > 1,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))


def _ratio(ours: Array, full: Array, axis: int = -1) -> Array:
    below = full.mean(axis=axis)
    # A resample without a single right unpruned answer has no ratio; its limit is infinite.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below == 0, np.inf, ours.mean(axis=axis) / below)


def _rates(own: Array, many: Array, other: Array, count: Array, axis: int = -1) -> Array:
    mine = own.sum(axis=axis) / many.sum(axis=axis)
    ratio: Array = mine / (other.sum(axis=axis) / count.sum(axis=axis))
    return ratio


def _scores(values: ArrayLike) -> Array:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"scores must be a non-empty list of numbers, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite")
    return scores


def _pair(ours: ArrayLike, theirs: ArrayLike) -> tuple[Array, Array]:
    first, second = _scores(ours), _scores(theirs)
    if len(first) != len(second):
        raise ValueError(f"paired scores differ in length: {len(first)} and {len(second)}")
    return first, second
