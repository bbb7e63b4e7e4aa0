"""Two runs on the same samples: which answers one of them broke and which it mended, and whether that is chance."""

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
from espalier.harness.store.stored_answers import Said, Told

#: What became of an answer.
BROKE, MENDED, SAME = "broke", "mended", "same"


@dataclass(frozen=True)
class Pair:
    """A sample under both runs, and what became of its answer."""

    ours: Said
    theirs: Said
    change: str


@dataclass(frozen=True)
class Comparison:
    """All common samples of two runs.

    Attributes:
        pairs: in the order of the benchmark.
        binary: whether every score is zero or full marks.
        right: samples that both have at full marks, None for scores in between.
        pvalue: McNemar's exact test where scores are binary, else the paired permutation test of their means; None
            where samples have no scores of their own.
        gain: the metric of ours minus theirs, by contributions, paired; None where they are not known.
    """

    pairs: Sequence[Pair]
    binary: bool
    right: int | None
    pvalue: float | None
    gain: Interval | None

    def count(self, change: str) -> int:
        """Return how many answers changed so."""
        return sum(pair.change == change for pair in self.pairs)


def compare(ours: Told, theirs: Told) -> Comparison:
    """Pair two runs by sample.

    Raises:
        UserError: they are of different benchmarks or share no sample.
    """
    mine, other = (run.row["benchmark"] for run in (ours, theirs))
    if mine != other:
        raise UserError(f"--against: a run on {other} cannot be paired with one on {mine}")
    keys = [key for key in ours.answers if key in theirs.answers]
    if not keys:
        raise UserError("--against: the two runs share no sample")
    both = [(ours.answers[key], theirs.answers[key]) for key in keys]
    pairs = [Pair(one, two, _change(one, two, ours.higher)) for one, two in both]
    scored = [(x.score, y.score) for x, y in both if x.score is not None and y.score is not None]
    values = {score for pair in scored for score in pair}
    whole = len(scored) == len(pairs)
    best = 100.0 if max(values, default=0.0) > 1 else 1.0
    binary = whole and values <= {0.0, best}
    broke, mended = (sum(pair.change == change for pair in pairs) for change in (BROKE, MENDED))
    pvalue = None
    if binary:
        pvalue = mcnemar_pvalue(broke, mended)
    elif whole:
        pvalue = permutation_pvalue(*np.array(scored, dtype=float).T)
    best = best if ours.higher else 0.0
    right = sum(pair == (best, best) for pair in scored) if binary else None
    return Comparison(pairs, binary, right, pvalue, _gain(both))


def _change(ours: Said, theirs: Said, higher: bool) -> str:
    if ours.score is None or theirs.score is None or ours.score == theirs.score:
        return SAME
    return MENDED if (ours.score > theirs.score) == higher else BROKE


def _gain(both: Sequence[tuple[Said, Said]]) -> Interval | None:
    shares = [(one.share, two.share) for one, two in both]
    if any(None in pair for pair in shares) or any(one.unit != two.unit for one, two in both):
        return None
    units = [one.unit for one, _ in both]
    ours, theirs = np.array(shares, dtype=float).T
    return difference_interval(by_unit(ours, units), by_unit(theirs, units))
