"""Intervals of scores: of one run, of two runs on the same samples, of an average over benchmarks.

If no answer changed, resampling the observed samples would give an interval of width zero. Therefore each end of an
interval counts one unobserved sample: for a difference and for retention one that became wrong at the lower end and one
that became right at the upper end, for a mean one at that end of the scale. Clopper and Pearson's binomial interval
does the same. If nothing changed, the bound is 3.7 / n. Benchmarks of an average share the unobserved sample. Clustered
samples are reduced to one value per unit first (`by_unit`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean
from typing import cast

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from espalier.harness.stats.interval import BLOCK, Array, Interval, checked, is_binary, paired

#: Largest root of the tail, maximum number of Newton steps, and of steps outwards from the estimate.
FAR, STEPS, OUTWARDS = 38.0, 60, 60


def bound(x: Array, y: Array, level: float, side: int) -> float:
    """Return the lower or upper end of the equal-tailed interval of sum(g x) / sum(g y) with probability `level`.

    Args:
        x: (n,) numerators.
        y: (n,) denominators, with a sum above zero; ones for a mean.
        level: between 0 and 1.
        side: -1 for the lower end, 1 for the upper one.

    Returns:
        The end; -inf or inf if observations set none.

    Cost: some 10 roots of a sum over the distinct observations.
    """
    pairs, counts = np.unique(x + 1j * y, return_counts=True)  # complex numbers sort as pairs
    above, below, weights = pairs.real.copy(), pairs.imag.copy(), counts.astype(np.float64)
    middle = float((weights * above).sum() / (weights * below).sum())
    gaps = above - middle * below
    error = math.sqrt(float((weights * gaps**2).sum())) / abs(float((weights * below).sum()))
    if error <= 1e-12 * max(1.0, abs(middle)):
        return middle
    quantile = side * float(stats.norm.ppf((1 + level) / 2))

    def root(t: float) -> float:
        return tail_root(above - t * below, weights)

    return _end(root, middle, quantile * error, -quantile)


def tail_root(a: Array, counts: Array) -> float:
    """Return the standard normal quantile of P(sum(g a) > 0), limited to `FAR` either way.

    Args:
        a: (k,) distinct values.
        counts: (k,) multiplicity of each; every occurrence has its own weight g.
    """
    smallest, largest = float(a.min()), float(a.max())
    if smallest >= 0 or largest <= 0:
        return FAR if largest > 0 else -FAR
    # The multiplier of the empirical likelihood: sum(a / (1 + s a)) = 0, with all 1 + s a above zero.
    low, high = -1 / largest, -1 / smallest
    s = float((counts * a).sum() / (counts * a**2).sum())
    if not low < s < high:
        s = 0.0
    for _ in range(STEPS):
        shares = a / (1 + s * a)
        slope, value = float((counts * shares**2).sum()), float((counts * shares).sum())
        low, high = (s, high) if value > 0 else (low, s)
        step = s + value / slope
        step = step if low < step < high else (low + high) / 2
        if abs(step - s) <= 1e-10 * abs(s) + 1e-300:
            break
        s = step
    w = math.copysign(math.sqrt(max(2 * float((counts * np.log1p(s * a)).sum()), 0.0)), s)
    v = s * math.sqrt(float((counts * (a / (1 + s * a)) ** 2).sum()))
    return w if abs(w) < 1e-4 else min(max(w + math.log(v / w) / w, -FAR), FAR)


def _end(root: Callable[[float], float], middle: float, step: float, target: float) -> float:
    """Return where `root` reaches `target`, searching outwards from the middle with growing steps."""
    sign, near = math.copysign(1.0, target), middle
    for _ in range(OUTWARDS):
        far = near + step
        if sign * (root(far) - target) >= 0:
            end = optimize.brentq(lambda t: root(t) - target, near, far, xtol=abs(step) * 1e-5)
            return float(end)
        near, step = far, step * 1.5
    return math.copysign(math.inf, step)


#: Numerator and denominator of a ratio, with an unobserved sample.
Parts = tuple[Array, Array]

#: Draws for an average over benchmarks.
RESAMPLES = 4000

#: Share of an unobserved sample that several benchmarks have together.
UNSEEN = 2 / 3


def mean_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """Return the mean of n scores and its interval.

    Scores that are all 0 or 1 get the exact binomial interval (Clopper and Pearson 1934), others that of the Bayesian
    bootstrap with one additional sample, at the respective end of the scale.

    Raises:
        ValueError: no scores, or scores that are not finite.
    """
    scores = checked(values)
    value = float(scores.mean())
    if is_binary(scores):
        test = stats.binomtest(int(scores.sum()), len(scores))
        exact = test.proportion_ci(confidence_level=level, method="exact")
        return Interval(value, float(exact.low), float(exact.high))
    return _interval(value, of_mean(scores), level)


def difference_interval(ours: ArrayLike, theirs: ArrayLike, level: float = 0.95) -> Interval:
    """Return mean(ours) - mean(theirs) on the same samples with its paired interval.

    Raises:
        ValueError: the two are not of equal length, empty or not finite.
    """
    first, second = paired(ours, theirs)
    return _interval(float((first - second).mean()), of_difference(first, second), level)


def retention_interval(ours: ArrayLike, full: ArrayLike, level: float = 0.95) -> Interval:
    """Return mean(ours) / mean(full), the retained share of the unpruned score, with its paired interval.

    Raises:
        ValueError: as `difference_interval`, or the unpruned mean is not above zero.
    """
    parts = of_retention(ours, full)
    return _interval(_share(ours, full), parts, level)


def average_retention(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]],
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
    combine: Callable[[Array], Array] | None = None,
) -> Interval:
    """Return the mean retained share over benchmarks, with a Bayesian bootstrap drawn within each benchmark.

    Several benchmarks share `UNSEEN` of an unobserved sample: if nothing changed on N samples of all of them the bound
    is 2.9 / N, which 6 % of draws exceed at the worst loss. A whole one in each, at its worst end in all at once, would
    cost a third of the power; without any the interval misses small losses (lab/measured/coverage.md).

    Args:
        pairs: for each benchmark scores (ours, full) of the same samples.
        level: between 0 and 1.
        seed: of the draws.
        resamples: number of draws.
        combine: makes one number of the shares along the first axis, benchmarks, and grows with each; None: the mean.

    Raises:
        ValueError: no benchmark, or as `retention_interval`.

    Cost: O(resamples n) for each benchmark of n samples.
    """
    if not pairs:
        raise ValueError("an average needs at least one benchmark")
    tables = [of_retention(*pair) for pair in pairs]
    shares = [_share(*pair) for pair in pairs]
    value = fmean(shares) if combine is None else float(combine(np.array(shares)))
    if any(len(checked(ours)) == 1 for ours, _ in pairs):
        return Interval(value, np.nan, np.nan)
    rng = np.random.default_rng(seed)
    unseen = 1.0 if len(tables) == 1 else UNSEEN / len(tables)
    draws = np.array([drawn_shares(table, rng, resamples, unseen) for table in tables])
    drawn = draws.mean(axis=0) if combine is None else combine(draws)
    low = np.quantile(drawn[:, 0], (1 - level) / 2)
    high = np.quantile(drawn[:, 1], (1 + level) / 2)
    return _around(value, float(low), float(high))


def _share(ours: ArrayLike, full: ArrayLike) -> float:
    first, second = paired(ours, full)
    return float(first.mean() / second.mean())


def drawn_shares(
    parts: tuple[Parts, Parts], rng: np.random.Generator, resamples: int, unseen: float
) -> Array:
    """Return draws of the weighted ratio under exponential weights, (resamples, 2): for either end.

    The last sample, which is unobserved, counts as `unseen` of a sample: its weight is of a gamma distribution.
    """
    table = np.stack([column for column_pair in parts for column in column_pair], axis=1)
    block, draws = max(1, BLOCK // len(table)), []
    for first in range(0, resamples, block):
        weights = rng.standard_exponential((min(block, resamples - first), len(table)))
        weights[:, -1] = rng.standard_gamma(unseen, len(weights)) if unseen else 0.0
        sums = weights @ table
        draws.append(sums[:, ::2] / sums[:, 1::2])
    return np.concatenate(draws)


def of_mean(scores: Array) -> tuple[Parts, Parts]:
    """Return the parts of a mean's two ends, each with a sample at that end of the scale."""
    low, high = _ends(scores)
    weights = np.ones(len(scores) + 1)
    return (np.append(scores, low), weights), (np.append(scores, high), weights)


def of_difference(ours: Array, theirs: Array) -> tuple[Parts, Parts]:
    """Return the parts of a difference's two ends: with a sample that became wrong, and with one that became right."""
    reach, weights = _reach(ours, theirs), np.ones(len(ours) + 1)
    return (np.append(ours - theirs, -reach), weights), (np.append(ours - theirs, reach), weights)


def of_retention(ours: ArrayLike, full: ArrayLike) -> tuple[Parts, Parts]:
    """Return numerator and denominator for two ends: with a sample that became wrong, and with one that became right.

    Raises:
        ValueError: as `retention_interval`.
    """
    first, second = paired(ours, full)
    if second.mean() <= 0:
        raise ValueError(
            f"retention is undefined: the unpruned mean is {second.mean():g}, not above zero"
        )
    reach = _reach(first, second)
    broken = np.append(first, 0.0), np.append(second, reach)
    return broken, (np.append(first, reach), np.append(second, 0.0))


def _interval(value: float, parts: tuple[Parts, Parts], level: float) -> Interval:
    lower, upper = parts
    if len(lower[0]) == 2:  # a single sample
        return Interval(value, np.nan, np.nan)
    return _around(value, bound(*lower, level, -1), bound(*upper, level, 1))


def _around(value: float, low: float, high: float) -> Interval:
    # With a handful of samples the unobserved ones may outweigh them.
    return Interval(value, min(low, value), max(high, value))


def _ends(*scores: Array) -> tuple[float, float]:
    """Return the ends of the scale: 0 and 1 if all scores are within, else the extreme scores and zero."""
    low = min(0.0, *(float(values.min()) for values in scores))
    high = max(0.0, *(float(values.max()) for values in scores))
    return (0.0, 1.0) if low == 0 and high <= 1 else (low, high)


def _reach(*scores: Array) -> float:
    """Return the largest possible change of a sample's score."""
    low, high = _ends(*scores)
    return high - low


def by_unit(values: Array, units: Sequence[Hashable]) -> Array:
    """Return one value per unit, with the same mean and independent units, in order of first appearance.

    If every sample is its own unit, the values are returned unchanged. A unit's value is the overall mean plus the sum
    of its members' deviations from it, times units over samples: the linearisation of a ratio over units of different
    size.
    """
    place = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    if len(place) == len(values):
        return values
    mean = values.mean()
    sums = np.bincount([place[unit] for unit in units], weights=values - mean)
    return cast("Array", mean + sums * (len(place) / len(values)))
