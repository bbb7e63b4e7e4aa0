"""Statistics against values known from closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness import stats


def test_binary_scores_get_the_clopper_pearson_interval() -> None:
    found = stats.mean_interval([1] * 9 + [0])
    # Textbook values for 9 of 10.
    assert found.value == pytest.approx(0.9)
    assert (found.low, found.high) == pytest.approx((0.5550, 0.9975), abs=5e-5)
    # With no failure in n trials the lower bound is (alpha / 2) ** (1 / n).
    assert stats.mean_interval([1] * 20).low == pytest.approx(0.025 ** (1 / 20))
    assert stats.mean_interval([True, False]).value == 0.5


def test_bootstrap_of_a_mean_agrees_with_the_normal_interval() -> None:
    scores = np.random.default_rng(1).normal(3.0, 2.0, 4000)
    found = stats.mean_interval(scores)
    half = 1.96 * scores.std(ddof=1) / math.sqrt(len(scores))
    assert found.low == pytest.approx(scores.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(scores.mean() + half, abs=0.1 * half)


def test_the_bootstrap_is_the_percentile_of_resampled_means() -> None:
    """On skewed scores the usual kinds of bootstrap disagree: reflected, corrected, or with normal ends."""
    scores = np.random.default_rng(7).exponential(size=12) ** 2
    found = stats.mean_interval(scores)
    means = np.random.default_rng(8).choice(scores, (200_000, 12)).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    assert (found.low, found.high) == pytest.approx((low, high), rel=0.02)
    reflected = 2 * scores.mean() - high
    assert abs(found.low - low) < 0.2 * abs(reflected - low)


def test_same_seed_same_interval_and_wider_level_wider_interval() -> None:
    scores = np.random.default_rng(2).random(50)
    assert stats.mean_interval(scores, seed=3) == stats.mean_interval(scores, seed=3)
    wide, narrow = stats.mean_interval(scores, level=0.99), stats.mean_interval(scores, level=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_pairing_removes_the_spread_that_samples_share() -> None:
    rng = np.random.default_rng(4)
    shared = rng.normal(0, 10, 300)
    ours, theirs = shared + 1.0 + rng.normal(0, 0.1, 300), shared
    paired = stats.difference_interval(ours, theirs)
    assert paired.value == pytest.approx(1.0, abs=0.02)
    assert paired.high - paired.low < 0.05
    unpaired = stats.difference_interval(ours, rng.permutation(theirs))
    assert unpaired.high - unpaired.low > 1.0


def test_retention_of_a_constant_share_has_no_width() -> None:
    full = np.random.default_rng(5).random(100) + 0.1
    found = stats.retention_interval(0.75 * full, full)
    assert (found.value, found.low, found.high) == pytest.approx((0.75, 0.75, 0.75))


def test_retention_covers_the_ratio_of_means() -> None:
    full = np.array([1.0] * 80 + [0.0] * 20)
    ours = np.array([1.0] * 60 + [0.0] * 40)
    found = stats.retention_interval(ours, full)
    assert found.value == pytest.approx(0.75)
    # Given 80 right, the lost 20 of them are binomial: sd = sqrt(.75 * .25 / 80).
    half = 1.96 * math.sqrt(0.75 * 0.25 / 80)
    assert found.low == pytest.approx(0.75 - half, abs=0.02)
    assert found.high == pytest.approx(0.75 + half, abs=0.02)
    with pytest.raises(ValueError, match="unpruned mean is zero"):
        stats.retention_interval([1.0, 0.0], [0.0, 0.0])


def test_permutation_test_is_the_exact_sign_test_on_binary_pairs() -> None:
    # Five discordant pairs, all in our favour: p = 2 / 2**5, whatever else agrees.
    ours, theirs = [1] * 5 + [1, 0] * 20, [0] * 5 + [1, 0] * 20
    assert stats.permutation_pvalue(ours, theirs) == pytest.approx(2 / 32)
    assert stats.permutation_pvalue(theirs, ours) == pytest.approx(2 / 32)
    assert stats.permutation_pvalue(ours, ours) == 1.0
    assert stats.permutation_pvalue([1, 1, 0], [1, 0, 0]) == 1.0


def test_permutation_test_holds_its_level_and_sees_a_difference() -> None:
    rng = np.random.default_rng(6)
    pvalues = [
        stats.permutation_pvalue(rng.normal(size=30), rng.normal(size=30), resamples=199)
        for _ in range(200)
    ]
    # Level 0.05 over 200 tests: 10 expected, 99.9 % of binomial draws are below 21.
    assert sum(p <= 0.05 for p in pvalues) <= 21
    shared = rng.normal(size=100)
    assert stats.permutation_pvalue(shared + 0.5, shared + rng.normal(0, 0.5, 100)) < 0.001


def test_bad_scores_are_refused_and_one_sample_has_no_interval() -> None:
    with pytest.raises(ValueError, match="non-empty"):
        stats.mean_interval([])
    with pytest.raises(ValueError, match="finite"):
        stats.mean_interval([0.5, math.nan])
    with pytest.raises(ValueError, match="differ in length: 2 and 1"):
        stats.difference_interval([1, 0], [1])
    assert math.isnan(stats.mean_interval([0.3]).low)


def test_a_ratio_of_rates_is_of_totals_and_resamples_whole_samples() -> None:
    samples = [(8.0, 2, 2.0, 2), (90.0, 18, 72.0, 18), (10.0, 5, 5.0, 5), (30.0, 10, 20.0, 10)]
    found = stats.rate_ratio_interval(samples)
    assert found.value == pytest.approx((138 / 35) / (99 / 35))
    assert found.low < found.value < found.high
    # No mix of these samples is beyond the ratios of the single ones.
    assert found.low >= 1.25
    assert found.high <= 4.0
    assert found == stats.rate_ratio_interval(samples)
    # Samples that are in proportion leave nothing open.
    same = stats.rate_ratio_interval([(2.0 * n, n, 1.0 * n, n) for n in (1, 5, 9)])
    assert (same.low, same.high) == (pytest.approx(2), pytest.approx(2))
    for wrong in ([], [(1.0, 2, 3.0)], [(1.0, 0, 1.0, 1)], [(1.0, 1, float("nan"), 1)]):
        with pytest.raises(ValueError, match="samples must be"):
            stats.rate_ratio_interval(wrong)
