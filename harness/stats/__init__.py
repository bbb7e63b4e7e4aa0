"""Intervals and tests for scores of samples and for times; how often they cover: harness/bench/coverage.py.

Methods are compared on the same samples, so differences and ratios are of pairs; treating the two runs as independent
would give intervals that are too wide.
"""

from harness.stats.interval import Interval
from harness.stats.pvalues import holm, mcnemar_pvalue, paired_pvalue, permutation_pvalue
from harness.stats.scores import (
    average_retention,
    difference_interval,
    mean_interval,
    retention_interval,
)
from harness.stats.times import rate_ratio_interval, ratio_interval, share_interval
from harness.stats.units import by_unit

__all__ = [
    "Interval",
    "average_retention",
    "by_unit",
    "difference_interval",
    "holm",
    "mcnemar_pvalue",
    "mean_interval",
    "paired_pvalue",
    "permutation_pvalue",
    "rate_ratio_interval",
    "ratio_interval",
    "retention_interval",
    "share_interval",
]
