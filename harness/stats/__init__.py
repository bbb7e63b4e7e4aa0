"""Intervals and tests for scores of samples and for times; coverage is measured by lab/bench/interval_coverage.py.

Methods are compared on the same samples, so differences and ratios are paired; treating the two runs as independent
would give too wide intervals.
"""

from espalier.harness.stats.interval import Interval
from espalier.harness.stats.pvalues import (
    SMALLEST,
    holm,
    mcnemar_midp,
    mcnemar_pvalue,
    paired_pvalue,
    permutation_pvalue,
)
from espalier.harness.stats.score_intervals import (
    average_retention,
    by_unit,
    difference_interval,
    mean_interval,
    retention_interval,
)
from espalier.harness.stats.time_ratios import rate_ratio_interval, ratio_interval, share_interval

__all__ = [
    "SMALLEST",
    "Interval",
    "average_retention",
    "by_unit",
    "difference_interval",
    "holm",
    "mcnemar_midp",
    "mcnemar_pvalue",
    "mean_interval",
    "paired_pvalue",
    "permutation_pvalue",
    "rate_ratio_interval",
    "ratio_interval",
    "retention_interval",
    "share_interval",
]
