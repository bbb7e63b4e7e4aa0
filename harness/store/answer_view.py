"""Answers of stored runs on the terminal, or as tab-separated values for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from espalier.harness.errors import plain
from espalier.harness.stats import Interval
from espalier.harness.store.answer_changes import BROKE, MENDED, SAME, Comparison, Pair
from espalier.harness.store.stored_answers import Said, Told

#: Characters of a cell at a terminal; whoever reads the other form gets all.
WIDTH = 60

#: Columns that a terminal does not break.
NARROW = ("sample", "change", "score")

COLOURS = {BROKE: "red", MENDED: "green"}

Cells = Sequence[str]


def wrong_answers(told: Told) -> list[Said]:
    """Return the answers without full marks; raises UserError where the metric has none."""
    best = told.full_marks
    return [one for one in told.answers.values() if one.score != best]


def answer_lines(answers: Sequence[Said]) -> tuple[Cells, list[Cells]]:
    """Return the heading and a line for each answer."""
    heading = ("sample", "score", "target", "answer", "question", "media")
    return heading, [
        (
            one.name,
            _score(one.score),
            _text(one, "target"),
            one.answer,
            _text(one, "question"),
            _media(one),
        )
        for one in answers
    ]


def pair_lines(pairs: Sequence[Pair]) -> tuple[Cells, list[Cells]]:
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
            *(one.ours.name, one.change, _score(one.ours.score), _score(one.theirs.score)),
            *(_text(one.ours, "target"), one.ours.answer, one.theirs.answer),
            *(_text(one.ours, "question"), _media(one.ours)),
        )
        for one in pairs
    ]


def verdict(ours: Told, theirs: Told, found: Comparison) -> list[str]:
    """Return the comparison in words, a line each."""
    broke, mended, same = (found.count(change) for change in (BROKE, MENDED, SAME))
    names = f"{ours.name} against {theirs.name} on {len(found.pairs)} common samples of {ours.row['benchmark']}"
    if found.binary:
        right = found.right or 0
        counts = f"broke {broke}, mended {mended}, both right {right}, both wrong {same - right}"
        test = f"McNemar's exact test: p = {found.pvalue:.3g}"
    elif found.pvalue is not None:
        counts = f"worse {broke}, better {mended}, equal {same}"
        test = f"paired permutation test of the means: p = {found.pvalue:.3g}"
    else:
        counts, test = f"{ours.metric} has no scores of single samples", "no test"
    return [f"{names}: {counts}; {test}", f"{ours.metric}: {_gain(found.gain)}"]


def write(lines: tuple[Cells, list[Cells]], stream: TextIO, limit: int | None) -> str | None:
    """Write lines as a table to a terminal, else tab-separated; return what is left out, if anything is."""
    heading, rows = lines
    shown = rows[:limit]
    if stream.isatty():
        table = Table()
        # References to media are for programs: a terminal has no room for them.
        for title in heading[:-1]:
            table.add_column(title, overflow="fold", no_wrap=title in NARROW)
        for row in shown:
            table.add_row(*(_cell(*pair) for pair in zip(heading[:-1], row, strict=False)))
        Console(file=stream).print(table)
    else:
        for row in (heading, *shown):
            stream.write("\t".join(_escaped(cell) for cell in row) + "\n")
    return (
        f"{len(shown)} of {len(rows)} shown; --limit 0 shows all"
        if len(shown) < len(rows)
        else None
    )


def write_table(lines: tuple[Cells, list[Cells]], stream: TextIO) -> None:
    """Write lines as a table to a terminal, in columns without a frame elsewhere."""
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
    for letter, written in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        cell = cell.replace(letter, written)
    return plain(cell)


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.4g}"


def _text(one: Said, name: str) -> str:
    value: Any = one.asked.get(name)
    return value if isinstance(value, str) else "" if value is None else str(value)


def _media(one: Said) -> str:
    return ", ".join(str(item.get("from")) for item in one.asked.get("media", ()))


def _gain(gain: Interval | None) -> str:
    if gain is None:
        return "no paired difference, contributions of samples are not known"
    return f"{gain.value:+.4g} [{gain.low:+.4g}, {gain.high:+.4g}], 95 %, paired"
