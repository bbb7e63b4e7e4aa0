"""Quantiles of a ratio of means under the Bayesian bootstrap, without drawing weights.

Rubin's Bayesian bootstrap (1981) weights n observations by independent exponentials g. The ratio sum(g x) / sum(g y) is
above t if sum(g a) > 0 for a = x - t y, a sum of exponentials with a tail given by the saddlepoint. Its signed root w
is that of the empirical likelihood (Owen 1988); Barndorff-Nielsen's w + log(v / w) / w is standard normal to the third
order (Lugannani and Rice 1980).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, stats

from espalier.harness.stats.interval import Array

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
    if abs(w) < 1e-4:
        return w
    return min(max(w + math.log(v / w) / w, -FAR), FAR)


def _end(root: Callable[[float], float], middle: float, step: float, target: float) -> float:
    """Return where `root` reaches `target`, searching outwards from the middle with growing steps."""
    sign, near = math.copysign(1.0, target), middle
    for _ in range(OUTWARDS):
        far = near + step
        if sign * (root(far) - target) >= 0:
            end: float = optimize.brentq(
                lambda t: root(t) - target, near, far, xtol=abs(step) * 1e-5
            )
            return end
        near, step = far, step * 1.5
    return math.copysign(math.inf, step)
