"""Tables of stored answers, for the terminal or as tab-separated values for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from espalier.harness.errors import UserError, plain
from espalier.harness.stats import (
    Interval,
    by_unit,
    difference_interval,
    mcnemar_midp,
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


#: Maximum characters of a cell at a terminal; tab-separated values are not cut.
WIDTH = 60

#: Columns that are not wrapped at a terminal.
NARROW = ("sample", "change", "score")

COLOURS = {BROKE: "red", MENDED: "green"}

Cells = Sequence[str]


def wrong_answers(run: AnsweredRun) -> list[StoredAnswer]:
    """Return the answers without full marks; raises UserError if the metric has no maximum."""
    best = run.full_marks
    return [answer for answer in run.answers.values() if answer.score != best]


def answer_lines(answers: Sequence[StoredAnswer]) -> tuple[Cells, list[Cells]]:
    """Return the heading and a line for each answer."""
    heading = ("sample", "score", "target", "answer", "question", "media")
    return heading, [
        (
            answer.name,
            _score(answer.score),
            _text(answer, "target"),
            answer.answer,
            _text(answer, "question"),
            _media(answer),
        )
        for answer in answers
    ]


def pair_lines(pairs: Sequence[AnswerPair]) -> tuple[Cells, list[Cells]]:
    """Return the heading and a line for each pair of answers."""
    heading = (
        "sample",
        "change",
        "score",
        "against",
        "target",
        "answer",
        "answer against",
        "question",
        "media",
    )
    return heading, [
        (
            *(pair.ours.name, pair.change, _score(pair.ours.score), _score(pair.theirs.score)),
            *(_text(pair.ours, "target"), pair.ours.answer, pair.theirs.answer),
            *(_text(pair.ours, "question"), _media(pair.ours)),
        )
        for pair in pairs
    ]


def picture_words(answer: StoredAnswer, rival: StoredAnswer | None = None) -> dict[str, str]:
    """Return the words beside a sample's picture, with the answer of the other run in a comparison."""
    words = {
        "sample": answer.name,
        "question": _text(answer, "question"),
        "target": _text(answer, "target"),
        "answer": answer.answer,
        "score": _score(answer.score),
    }
    return words if rival is None else {**words, "answer against": rival.answer}


def comparison_lines(ours: AnsweredRun, theirs: AnsweredRun, comparison: Comparison) -> list[str]:
    """Return the comparison as lines of text."""
    broke, mended, unchanged = (comparison.count(change) for change in (BROKE, MENDED, SAME))
    names = f"{ours.name} against {theirs.name} on {len(comparison.pairs)} common samples of {ours.row['benchmark']}"
    if comparison.binary:
        right = comparison.right or 0
        counts = (
            f"broke {broke}, mended {mended}, both right {right}, both wrong {unchanged - right}"
        )
        test = f"McNemar's exact test: p = {comparison.pvalue:.3g}, mid-p = {mcnemar_midp(broke, mended):.3g}"
    elif comparison.pvalue is not None:
        counts = f"worse {broke}, better {mended}, equal {unchanged}"
        test = f"paired permutation test of the means: p = {comparison.pvalue:.3g}"
    else:
        counts, test = f"{ours.metric} has no scores of single samples", "no test"
    return [f"{names}: {counts}; {test}", f"{ours.metric}: {_gain_text(comparison.gain)}"]


def write(lines: tuple[Cells, list[Cells]], stream: TextIO, limit: int | None) -> str | None:
    """Write lines as a table to a terminal, else tab-separated; return a note if rows are left out."""
    heading, rows = lines
    shown_rows = rows[:limit]
    if stream.isatty():
        table = Table()
        # References to media are for programs: they do not fit on a terminal.
        for title in heading[:-1]:
            table.add_column(title, overflow="fold", no_wrap=title in NARROW)
        for row in shown_rows:
            table.add_row(*(_cell(*pair) for pair in zip(heading[:-1], row, strict=False)))
        Console(file=stream).print(table)
    else:
        for row in (heading, *shown_rows):
            stream.write("\t".join(_escaped(cell) for cell in row) + "\n")
    return (
        f"{len(shown_rows)} of {len(rows)} shown; --limit 0 shows all"
        if len(shown_rows) < len(rows)
        else None
    )


def write_table(lines: tuple[Cells, Sequence[Cells]], stream: TextIO) -> None:
    """Write lines as a table to a terminal, else in columns without a frame."""
    heading, rows = lines
    rows = [tuple(plain(cell) for cell in row) for row in rows]
    if stream.isatty():
        table = Table(*heading)
        for row in rows:
            table.add_row(*map(escape, row))
        Console(file=stream).print(table)
        return
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    for row in [heading, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        stream.write("  ".join(cells).rstrip() + "\n")


def _cell(title: str, cell: str) -> str:
    cell = plain(cell)
    short = cell if len(cell) <= WIDTH else f"{cell[: WIDTH - 1]}…"
    colour = COLOURS.get(cell) if title == "change" else None
    return f"[{colour}]{cell}[/]" if colour else escape(short)


def _escaped(cell: str) -> str:
    for letter, escape_sequence in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        cell = cell.replace(letter, escape_sequence)
    return plain(cell)


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.4g}"


def _text(answer: StoredAnswer, name: str) -> str:
    value: Any = answer.prompt.get(name)
    return value if isinstance(value, str) else "" if value is None else str(value)


def _media(answer: StoredAnswer) -> str:
    """Return where the pictures and videos of a sample come from: their files, else their place in the data set."""
    return ", ".join(
        str(item.get("path", item.get("from"))) for item in answer.prompt.get("media", ())
    )


def _gain_text(gain: Interval | None) -> str:
    if gain is None:
        return "no paired difference, contributions of samples are not known"
    return f"{gain.value:+.4g} [{gain.low:+.4g}, {gain.high:+.4g}], 95 %, paired"
