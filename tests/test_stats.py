"""Statistics compared with values known from closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from numpy.typing import NDArray

from espalier.harness import stats
from espalier.harness.stats.power import power_of, samples_for_scores, samples_needed

Array = NDArray[np.float64]


def test_binary_scores_get_the_clopper_pearson_interval() -> None:
    interval = stats.mean_interval([1] * 9 + [0])
    # Textbook values for 9 of 10.
    assert interval.value == pytest.approx(0.9)
    assert (interval.low, interval.high) == pytest.approx((0.5550, 0.9975), abs=5e-5)
    # With no failure in n trials the lower bound is (alpha / 2) ** (1 / n).
    assert stats.mean_interval([1] * 20).low == pytest.approx(0.025 ** (1 / 20))
    assert stats.mean_interval([True, False]).value == 0.5


def test_the_interval_of_many_scores_is_the_normal_one() -> None:
    scores = np.random.default_rng(1).normal(3.0, 2.0, 4000)
    interval = stats.mean_interval(scores)
    half = 1.96 * scores.std(ddof=1) / math.sqrt(len(scores))
    assert interval.low == pytest.approx(scores.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(scores.mean() + half, abs=0.1 * half)
    wide, narrow = stats.mean_interval(scores, level=0.99), stats.mean_interval(scores, level=0.5)
    assert wide.low < interval.low < narrow.low < narrow.high < interval.high < wide.high


def dirichlet(above: Array, below: Array, draws: int = 200_000) -> tuple[float, float]:
    """Rubin's Bayesian bootstrap as it is written: exponential weights, drawn."""
    weights = np.random.default_rng(9).standard_exponential((draws, len(above)))
    low, high = np.quantile((weights @ above) / (weights @ below), (0.025, 0.975))
    return float(low), float(high)


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_retention_is_the_bayesian_bootstrap_with_one_broken_or_one_mended(lost: int) -> None:
    full = np.array([1.0] * 36 + [0.4] * 4)
    ours = full.copy()
    ours[:lost] = 0.0
    low, _ = dirichlet(np.append(ours, 0.0), np.append(full, 1.0))
    _, high = dirichlet(np.append(ours, 1.0), np.append(full, 0.0))
    interval = stats.retention_interval(ours, full)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.02 * (high - low))


def test_a_mean_and_a_difference_are_so_too() -> None:
    """On skewed scores, where the normal interval is off by a tenth of its width."""
    scores = np.random.default_rng(7).beta(0.3, 2.0, 20)
    weights = np.ones(21)
    low, _ = dirichlet(np.append(scores, 0.0), weights)
    _, high = dirichlet(np.append(scores, 1.0), weights)
    interval = stats.mean_interval(scores)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.02 * (high - low))
    low, _ = dirichlet(np.append(-scores, -1.0), weights)
    _, high = dirichlet(np.append(-scores, 1.0), weights)
    interval = stats.difference_interval(np.zeros(20), scores)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.02 * (high - low))
    middle, half = interval.value, 1.96 * scores.std(ddof=1) / math.sqrt(20)
    assert abs(middle - half - interval.low) > 0.05 * (high - low)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_where_nothing_changed_the_bound_is_that_of_no_failure_in_n_trials(scale: float) -> None:
    full = np.full(500, scale)
    kept, missed = stats.retention_interval(full, full), 1 - 0.025 ** (1 / 500)
    assert 1 - kept.low == pytest.approx(missed, rel=0.01)
    # For a share that went up the samples weigh less than the additional one.
    assert kept.high - 1 == pytest.approx(missed, rel=0.02)
    gap = stats.difference_interval(full, full)
    assert (-gap.low, gap.high) == pytest.approx((scale * missed,) * 2, rel=0.01)


@pytest.mark.parametrize(("benchmarks", "n"), [(1, 200), (2, 100), (6, 60)])
def test_where_nothing_changed_benchmarks_of_an_average_share_the_unobserved_sample(
    benchmarks: int, n: int
) -> None:
    full = np.ones(n)
    kept = stats.average_retention([(full, full)] * benchmarks)
    # A gamma weight for each benchmark, its share of what the benchmarks have together, among n others.
    share = 1.0 if benchmarks == 1 else 2 / 3 / benchmarks
    rng = np.random.default_rng(1)
    unseen = rng.gamma(share, size=(100_000, benchmarks))
    lost = (unseen / (unseen + rng.gamma(n, size=unseen.shape))).mean(1)
    bound = np.quantile(lost, 0.975)
    assert (1 - kept.low, kept.high - 1) == pytest.approx((bound, bound), rel=0.08)


def test_an_average_over_benchmarks_resamples_each_within() -> None:
    rng = np.random.default_rng(3)
    pairs = [((rng.random(n) < 0.7).astype(float), np.ones(n)) for n in (80, 200)]
    interval = stats.average_retention(pairs)
    intervals = [stats.retention_interval(*pair) for pair in pairs]
    assert interval.value == pytest.approx(np.mean([alone.value for alone in intervals]))
    # Independent benchmarks: half widths add up as squares, over their number.
    half = math.hypot(*(alone.high - alone.low for alone in intervals)) / 4
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.06)
    assert interval == stats.average_retention(pairs)
    with pytest.raises(ValueError, match="at least one benchmark"):
        stats.average_retention([])


def test_pairing_removes_the_spread_that_samples_share() -> None:
    rng = np.random.default_rng(4)
    shared = rng.normal(0, 10, 300)
    ours, theirs = shared + 1.0 + rng.normal(0, 0.1, 300), shared
    paired = stats.difference_interval(ours, theirs)
    assert paired.value == pytest.approx(1.0, abs=0.02)
    # At either end one sample as far off as any score may go, 60 points, is counted among 300.
    assert paired.high - paired.low < 1.5
    unpaired = stats.difference_interval(ours, rng.permutation(theirs))
    assert unpaired.high - unpaired.low > 2.0


def test_retention_covers_the_ratio_of_means() -> None:
    full = np.array([1.0] * 80 + [0.0] * 20)
    interval = stats.retention_interval(np.array([1.0] * 60 + [0.0] * 40), full)
    assert interval.value == pytest.approx(0.75)
    # Given 80 right, the lost 20 of them are binomial: sd = sqrt(.75 * .25 / 80).
    half = 1.96 * math.sqrt(0.75 * 0.25 / 80)
    assert interval.low == pytest.approx(0.75 - half, abs=0.02)
    assert interval.high == pytest.approx(0.75 + half, abs=0.02)
    with pytest.raises(ValueError, match="not above zero"):
        stats.retention_interval([1.0, 0.0], [0.0, 0.0])


def test_permutation_test_is_the_exact_sign_test_on_binary_pairs() -> None:
    # Five discordant pairs, all in our favour: p = 2 / 2**5, whatever else agrees.
    ours, theirs = [1] * 5 + [1, 0] * 20, [0] * 5 + [1, 0] * 20
    assert stats.permutation_pvalue(ours, theirs) == pytest.approx(2 / 32)
    assert stats.permutation_pvalue(theirs, ours) == pytest.approx(2 / 32)
    assert stats.permutation_pvalue(ours, ours) == 1.0
    assert stats.permutation_pvalue([1, 1, 0], [1, 0, 0]) == 1.0
    assert stats.paired_pvalue(ours, theirs) == pytest.approx(2 / 32)


def test_permutations_are_those_of_scipy() -> None:
    rng = np.random.default_rng(11)
    for n, tolerance in ((9, 1e-12), (60, 0.02)):  # all swaps, and 9,999 of them
        gaps = rng.normal(0.25, 1, n)
        slow = scipy.stats.permutation_test(
            (gaps,), np.mean, permutation_type="samples", vectorized=True, rng=1
        ).pvalue
        assert stats.paired_pvalue(gaps, np.zeros(n)) == pytest.approx(slow, abs=tolerance)


def test_holm_corrects_in_order() -> None:
    # Holm's own example of four: 4 p(1), 3 p(2), 2 p(3), p(4), never falling.
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert (stats.holm([0.6, 0.9]), stats.holm([])) == ([1.0, 1.0], [])
    with pytest.raises(ValueError, match="between 0 and 1"):
        stats.holm([1.2])


def test_the_samples_that_are_needed_are_enough() -> None:
    needed = samples_needed(0.05, 0.1)
    assert 300 <= needed <= 380  # Connor's formula, without continuity, says 312
    drawn = np.random.default_rng(12).multinomial(needed, (0.025, 0.075, 0.9), size=1000)
    interval = np.mean([stats.mcnemar_pvalue(broke, mended) <= 0.05 for broke, mended, _ in drawn])
    assert interval == pytest.approx(power_of(needed, 0.05, 0.1), abs=0.04)
    assert 0.8 <= power_of(needed, 0.05, 0.1) < 0.84
    assert samples_for_scores(0.1, 0.5) == 197  # (2.8016 * 5) ** 2 = 196.2
    with pytest.raises(ValueError, match="discordance"):
        samples_needed(0.2, 0.1)
    with pytest.raises(ValueError, match="do not differ"):
        samples_needed(0.0, 0.1)


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
    interval = stats.rate_ratio_interval(samples)
    assert interval.value == pytest.approx((138 / 35) / (99 / 35))
    assert interval.low < interval.value < interval.high
    # No mix of these samples is beyond the ratios of the single ones.
    assert interval.low >= 1.25
    assert interval.high <= 4.0
    assert interval == stats.rate_ratio_interval(samples)
    # Samples that are in proportion leave nothing open.
    same = stats.rate_ratio_interval([(2.0 * n, n, 1.0 * n, n) for n in (1, 5, 9)])
    assert (same.low, same.high) == (pytest.approx(2), pytest.approx(2))
    share = stats.share_interval([3, 4, 8], [4, 8, 8])
    assert share.value == pytest.approx(0.75)
    assert 0.5 <= share.low < 0.75 < share.high <= 1.0
    assert stats.share_interval([3, 6], [4, 8]) == stats.Interval(0.75, 0.75, 0.75)
    for wrong in ([], [(1.0, 2, 3.0)], [(1.0, 0, 1.0, 1)], [(1.0, 1, float("nan"), 1)]):
        with pytest.raises(ValueError, match="samples must be"):
            stats.rate_ratio_interval(wrong)


def test_the_mid_p_value_counts_what_is_as_likely_as_the_observed_by_half() -> None:
    for broke in range(9):
        for mended in range(9):
            chances = np.array([math.comb(broke + mended, k) for k in range(broke + mended + 1)])
            observed = chances[broke]
            expected = chances[chances < observed].sum() + chances[chances == observed].sum() / 2
            expected = 1.0 if broke + mended == 0 else expected / 2 ** (broke + mended)
            assert stats.mcnemar_midp(broke, mended) == pytest.approx(expected, abs=1e-12)
