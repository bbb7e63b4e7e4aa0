"""Number of samples needed to separate two methods."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats


def power_of(samples: int, difference: float, discordance: float, level: float = 0.05) -> float:
    """Return the probability that McNemar's exact test detects a difference.

    Args:
        samples: that both methods answer.
        difference: of their accuracies, either way.
        discordance: share of samples that exactly one of them gets right; at least the size of the difference.
        level: of the test; divide it by the number of comparisons for the first step of Holm's correction.

    Raises:
        ValueError: the discordance is not a share, or smaller than the difference.

    Cost: O(samples), over the relevant counts of changed answers.
    """
    if not 0 < discordance <= 1 or abs(difference) > discordance:
        raise ValueError(
            f"discordance={discordance} must be at most 1 and at least the difference, {abs(difference)}"
        )
    spread = 8 * math.sqrt(samples * discordance) + 20
    centre = samples * discordance
    counts = np.arange(max(1, int(centre - spread)), min(samples, int(centre + spread)) + 1)
    # Largest number on the losing side at which the two-sided test of that many changed answers is significant.
    critical = stats.binom.ppf(level / 2, counts, 0.5)
    critical = np.where(stats.binom.cdf(critical, counts, 0.5) > level / 2, critical - 1, critical)
    share = (discordance + abs(difference)) / (2 * discordance)
    detected = stats.binom.cdf(critical, counts, 1 - share) + stats.binom.cdf(
        critical, counts, share
    )
    return float((stats.binom.pmf(counts, samples, discordance) * detected).sum())


def samples_needed(
    difference: float, discordance: float, power: float = 0.8, level: float = 0.05
) -> int:
    """Return the samples that McNemar's exact test needs to detect a difference with this power; see `power_of`.

    The power of an exact test rises in a sawtooth: the result is the first number from which it stays above for one
    tooth length, one in a hundred more.

    Raises:
        ValueError: no difference, or as `power_of`.
    """
    if difference == 0:
        raise ValueError("methods that do not differ are separated by no number of samples")
    high = 16
    while power_of(high, difference, discordance, level) < power:
        high *= 2
    low = high // 2
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        reached = all(
            power_of(middle + offset, difference, discordance, level) >= power
            for offset in (0, 1 + middle // 100)
        )
        low, high = (low, middle) if reached else (middle, high)
    return high


def samples_for_scores(
    difference: float, deviation: float, power: float = 0.8, level: float = 0.05
) -> int:
    """Return the samples that separate two means of graded scores, paired; by the normal approximation.

    Args:
        difference: of the means, either way.
        deviation: standard deviation of the samples' differences.
        power: probability of detecting it.
        level: of the test.

    Raises:
        ValueError: no difference.
    """
    if difference == 0:
        raise ValueError("methods that do not differ are separated by no number of samples")
    quantiles = stats.norm.ppf(1 - level / 2) + stats.norm.ppf(power)
    return math.ceil(float(quantiles * deviation / difference) ** 2)
