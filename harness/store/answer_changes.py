"""Comparison of two runs sample by sample: answers that became wrong or right, and whether that may be chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espalier.harness.errors import UserError
from espalier.harness.stats import (
    Interval,
    by_unit,
    difference_interval,
    mcnemar_pvalue,
    permutation_pvalue,
)
from espalier.harness.store.stored_answers import AnsweredRun, StoredAnswer

#: How an answer changed.
BROKE, MENDED, SAME = "broke", "mended", "same"


@dataclass(frozen=True)
class AnswerPair:
    """A sample's answers under both runs, and how the answer changed."""

    ours: StoredAnswer
    theirs: StoredAnswer
    change: str


@dataclass(frozen=True)
class Comparison:
    """All common samples of two runs.

    Attributes:
        pairs: in the order of the benchmark.
        binary: whether every score is zero or full marks.
        right: samples that both have at full marks, None for scores in between.
        pvalue: McNemar's exact test if scores are binary, else the paired permutation test of their means; None if
            samples have no scores.
        gain: the metric of ours minus theirs, by contributions, paired; None if these are not known.
    """

    pairs: Sequence[AnswerPair]
    binary: bool
    right: int | None
    pvalue: float | None
    gain: Interval | None

    def count(self, change: str) -> int:
        """Return the number of answers with this change."""
        return sum(pair.change == change for pair in self.pairs)


def compare(ours: AnsweredRun, theirs: AnsweredRun) -> Comparison:
    """Pair the answers of two runs by sample.

    Raises:
        UserError: the runs are of different benchmarks or share no sample.
    """
    benchmark, other_benchmark = (run.row["benchmark"] for run in (ours, theirs))
    if benchmark != other_benchmark:
        raise UserError(
            f"--against: a run on {other_benchmark} cannot be paired with one on {benchmark}"
        )
    keys = [key for key in ours.answers if key in theirs.answers]
    if not keys:
        raise UserError("--against: the two runs share no sample")
    answers = [(ours.answers[key], theirs.answers[key]) for key in keys]
    pairs = [AnswerPair(a, b, _change(a, b, ours.higher)) for a, b in answers]
    scored = [(a.score, b.score) for a, b in answers if a.score is not None and b.score is not None]
    values = {score for pair in scored for score in pair}
    all_scored = len(scored) == len(pairs)
    best = 100.0 if max(values, default=0.0) > 1 else 1.0
    binary = all_scored and values <= {0.0, best}
    broke, mended = (sum(pair.change == change for pair in pairs) for change in (BROKE, MENDED))
    pvalue = None
    if binary:
        pvalue = mcnemar_pvalue(broke, mended)
    elif all_scored:
        pvalue = permutation_pvalue(*np.array(scored, dtype=float).T)
    best = best if ours.higher else 0.0
    right = sum(pair == (best, best) for pair in scored) if binary else None
    return Comparison(pairs, binary, right, pvalue, _gain(answers))


def _change(ours: StoredAnswer, theirs: StoredAnswer, higher: bool) -> str:
    if ours.score is None or theirs.score is None or ours.score == theirs.score:
        return SAME
    return MENDED if (ours.score > theirs.score) == higher else BROKE


def _gain(answers: Sequence[tuple[StoredAnswer, StoredAnswer]]) -> Interval | None:
    shares = [(a.share, b.share) for a, b in answers]
    if any(None in pair for pair in shares) or any(a.unit != b.unit for a, b in answers):
        return None
    units = [a.unit for a, _ in answers]
    ours, theirs = np.array(shares, dtype=float).T
    return difference_interval(by_unit(ours, units), by_unit(theirs, units))
