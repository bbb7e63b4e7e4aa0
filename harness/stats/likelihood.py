"""Where the Bayesian bootstrap puts a ratio of means, without drawing a single weight.

Rubin's Bayesian bootstrap (1981) weighs n observations by independent exponentials g. The ratio sum(g x) / sum(g y) is
above t where sum(g a) > 0 for a = x - t y, a sum of exponentials whose tail the saddlepoint gives. Its
signed root w is that of the empirical likelihood (Owen 1988); Barndorff-Nielsen's w + log(v / w) / w is standard normal
to the third order (Lugannani and Rice 1980).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, stats

from espalier.harness.stats.interval import Array

#: Root of the tail beyond which nothing is told apart, Newton's steps at most, and steps outwards from the estimate.
FAR, STEPS, OUTWARDS = 38.0, 60, 60


def bound(x: Array, y: Array, level: float, side: int) -> float:
    """Return the lower or the upper end of what holds sum(g x) / sum(g y) with probability `level`, tails being equal.

    Args:
        x: (n,) what is above the line.
        y: (n,) what is below it, of a sum above zero; ones for a mean.
        level: between 0 and 1.
        side: -1 for the lower end, 1 for the upper one.

    Returns:
        The end; -inf or inf where observations set none.

    Cost: some 10 roots of a sum over the distinct observations.
    """
    pairs, counts = np.unique(x + 1j * y, return_counts=True)  # complex numbers sort as pairs
    above, below, many = pairs.real.copy(), pairs.imag.copy(), counts.astype(np.float64)
    middle = float((many * above).sum() / (many * below).sum())
    gaps = above - middle * below
    error = math.sqrt(float((many * gaps**2).sum())) / abs(float((many * below).sum()))
    if error <= 1e-12 * max(1.0, abs(middle)):
        return middle
    wanted = side * float(stats.norm.ppf((1 + level) / 2))

    def root(t: float) -> float:
        return tail_root(above - t * below, many)

    return _end(root, middle, wanted * error, -wanted)


def tail_root(a: Array, counts: Array) -> float:
    """Return the standard normal number whose lower tail is P(sum(g a) > 0), at most `FAR` either way.

    Args:
        a: (k,) distinct values.
        counts: (k,) how often each is there, each time with a weight g of its own.
    """
    least, most = float(a.min()), float(a.max())
    if least >= 0 or most <= 0:
        return FAR if most > 0 else -FAR
    # The multiplier of the empirical likelihood: sum(a / (1 + s a)) = 0, with all 1 + s a above zero.
    low, high = -1 / most, -1 / least
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


def _end(root: Callable[[float], float], middle: float, step: float, wanted: float) -> float:
    """Return where `root` is `wanted`, outwards from the middle by growing steps."""
    sign, near = math.copysign(1.0, wanted), middle
    for _ in range(OUTWARDS):
        far = near + step
        if sign * (root(far) - wanted) >= 0:
            found: float = optimize.brentq(
                lambda t: root(t) - wanted, near, far, xtol=abs(step) * 1e-5
            )
            return found
        near, step = far, step * 1.5
    return math.copysign(math.inf, step)
