"""What the formats of a table share: a cell in words, and the sections under the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from espalier.harness.reports.tables.cell_runs import Wanted
from espalier.harness.reports.tables.cell_verdicts import Filled
from espalier.harness.reports.tables.panels import called
from espalier.harness.reports.tables.rebuilt_table import Line, Table
from espalier.harness.store.unparsed_mark import MARK, MEANS, mark

LEGEND = (
    "A cell holds what was measured, and in brackets what is printed, the difference, the verdict and n, the samples "
    "behind it; of a cell that nothing measured the brackets alone. Behind = or ≠ stands what a formula gives: ≠ where "
    "the print is known to be wrong. † marks an average that does not follow from the cells printed beside it, "
    f"{MARK} a score of which {MEANS}."
)


def digits(one: Filled) -> int:
    """Return the digits behind the point that a number of a cell is shown with: the printed ones, two of a stand-in."""
    return one.cell.digits if one.cell.value and not one.unlike else 2


def measured(one: Filled) -> str:
    """Return the measured number as text, empty if there is none."""
    return "" if one.value is None else f"{one.value:.{digits(one)}f}{mark(one.unread)}"


def difference(one: Filled) -> str:
    """Return the difference as text, empty if there is none."""
    return "" if one.difference is None else f"{one.difference:+.{max(digits(one), 1)}f}"


def formula(one: Filled) -> str:
    """Return what a formula gives as text, with = or, of a misprint, ≠ in front; empty if none does."""
    if one.analytic is None:
        return ""
    sign, value = "≠" if one.analytic.misprint else "=", one.analytic.value
    # A count that is printed without a point has none here either, unless the formula's is no whole number.
    behind = 0 if one.cell.digits == 0 and value == round(value) else max(one.cell.digits, 1)
    return f"{sign} {value:.{behind}f}"


def samples(one: Filled) -> str:
    """Return how many samples are behind a measured cell, as text; empty if none is."""
    return "" if one.row is None else f"n={one.row.samples:,}"


def parts(one: Filled) -> list[str]:
    """Return a cell with a number in words: the measured number, or else the printed one, and what stands beside it."""
    dagger = "†" if one.remark else ""
    nothing = "" if one.value is not None else "-"
    printed = " ".join(filter(None, (f"{one.cell.value or nothing}{dagger}", formula(one))))
    if one.value is None:
        return [printed]
    judged = "" if one.difference is None else f"{difference(one)} {one.verdict}"
    return [measured(one), *filter(None, (printed, judged, samples(one)))]


def cell(one: Filled | None) -> str:
    """Return a cell in words."""
    if one is None or (not one.cell.value and one.value is None):
        return "-"
    shown, *rest = parts(one)
    return f"{shown} ({', '.join(rest)})" if one.value is not None else f"({shown})"


def missing(one: Filled) -> str:
    """Return the command that fills a cell without a number, or why there is none; empty if it has a number."""
    if one.value is not None:
        return ""
    return f"python run.py {' '.join(one.run.line)}" if isinstance(one.run, Wanted) else one.run


def blocks(table: Table) -> Iterator[tuple[tuple[str, ...], list[Line]]]:
    """Yield the lines of a table under equal headings."""
    for headings, lines in groupby(table.lines, key=lambda line: line.headings):
        yield headings, list(lines)


def title(table: Table) -> str:
    """Return the table's title."""
    paper = table.paper
    return f"{paper.paper}, {called(table.number)}: {table.entry.title}"


def source(table: Table) -> str:
    """Return where the printed numbers come from."""
    paper = table.paper
    text = f"{paper.title} ({paper.venue}, arXiv {paper.arxiv})."
    if table.model is None:
        return text
    return (
        f"{text} Measured on {table.model} and its benchmarks, which stand for the printed ones: its numbers are not "
        "to be compared with theirs."
    )


def head(column: tuple[str, ...]) -> str:
    """Return a column's head."""
    return " ".join(part for part in column if part) or "value"


def said(table: Table) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections under a table: a title and lines."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(table.counts.items()))
    yield "Cells", [f"{len(table.filled)} cells: {counts}"]
    if table.notes:
        yield "Rows", list(table.notes)
    sources = Counter(one.analytic.source for one in table.filled if one.analytic is not None)
    if sources:
        yield "Formulas", _counted(sources)
    wrong = Counter(
        one.analytic.misprint
        for one in table.filled
        if one.analytic is not None and one.analytic.misprint
    )
    if wrong:
        yield "Misprints", _counted(wrong)
    if table.model is None and table.uncompared():
        yield "Cells that are not compared with print", _listed(table.uncompared())
    if table.unreachable():
        yield "Cells that no run fills", _listed(table.unreachable())
    if table.commands():
        yield "Missing cells, and what fills them", table.commands()


def _listed(found: Mapping[str, int]) -> list[str]:
    return [f"{count}: {reason}" for reason, count in found.items()]


def _counted(found: Counter[str]) -> list[str]:
    return [f"{count} {'cell' if count == 1 else 'cells'}: {what}" for what, count in found.items()]


AVERAGES = ("line", "printed", "from the printed cells", "over the same benchmarks", "measured", "")


def averages(table: Table) -> Iterator[tuple[str, ...]]:
    """Yield a line for each average: printed, by the paper's rule, by the consistent one, measured, the remark."""
    for one in table.averaged:
        where = ", ".join(
            part for part in (one.cell.model, one.cell.budget, one.cell.method) if part
        )
        numbers = (one.follows, one.consistent, one.own)
        follows, consistent, own = ("" if value is None else f"{value:.2f}" for value in numbers)
        own += mark(bool(own) and one.unread)
        shared = f"{consistent} ({one.shared})" if consistent else ""
        yield where, one.cell.value or "-", follows, shared, own, one.remark
