"""Ratios of times and rates: of paired measurements, and of totals over samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from espalier.harness.stats.interval import BLOCK, Array, Interval, paired

#: Default number of resamples, the usual choice for 95 % percentile intervals.
RESAMPLES = 9999


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
    return _bootstrap(tuple(table.T), _rates, level, seed, resamples)


def share_interval(
    parts: ArrayLike,
    wholes: ArrayLike,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return sum(parts) / sum(wholes), such as accepted over judged tokens, with its paired bootstrap interval.

    Raises:
        ValueError: scores as `espalier.harness.stats.difference_interval` refuses them, or wholes that sum to zero.
    """
    first, second = paired(parts, wholes)
    if second.sum() == 0:
        raise ValueError("a share is undefined: the wholes add up to zero")
    return _bootstrap((first, second), _share, level, seed, resamples)


def ratio_interval(ours: ArrayLike, theirs: ArrayLike, level: float = 0.95) -> Interval:
    """Return the geometric mean of ours / theirs, pair by pair, with Student's interval on the logarithms.

    For alternating measurements: pairs are few, and resampling four of them would give too narrow intervals.

    Raises:
        ValueError: scores as `espalier.harness.stats.difference_interval` refuses them, or a value is not above zero.
    """
    first, second = paired(ours, theirs)
    if min(first.min(), second.min()) <= 0:
        raise ValueError("ratios need values above zero")
    logs = np.log(first / second)
    middle, n = float(logs.mean()), len(logs)
    if n == 1:
        return Interval(math.exp(middle), math.nan, math.nan)
    half = float(stats.t.ppf((1 + level) / 2, n - 1) * logs.std(ddof=1)) / math.sqrt(n)
    return Interval(*map(math.exp, (middle, middle - half, middle + half)))


def _bootstrap(
    data: Sequence[Array],
    statistic: Callable[..., Array],
    level: float,
    seed: int,
    resamples: int,
) -> Interval:
    n, value = len(data[0]), float(statistic(*data))
    if n == 1:
        return Interval(value, math.nan, math.nan)
    # Resamples are drawn here with an explicit block size; memory stays bounded for large n.
    interval = stats.bootstrap(
        data,
        statistic,
        n_resamples=resamples,
        batch=max(1, BLOCK // n),
        vectorized=True,
        paired=True,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(interval.low), float(interval.high))


def _share(parts: Array, wholes: Array, axis: int = -1) -> Array:
    below = wholes.sum(axis=axis)
    # A resample with a zero total has no share; its limit is infinite.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below == 0, np.inf, parts.sum(axis=axis) / below)


def _rates(
    times: Array, tokens: Array, other_times: Array, other_tokens: Array, axis: int = -1
) -> Array:
    rate = times.sum(axis=axis) / tokens.sum(axis=axis)
    return cast("Array", rate / (other_times.sum(axis=axis) / other_tokens.sum(axis=axis)))
