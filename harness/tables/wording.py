"""What the formats of a table share: a cell in words, and the sections under the table."""

from __future__ import annotations

from collections.abc import Iterator

from harness.tables.filling import Filled
from harness.tables.table import Table

LEGEND = (
    "A cell holds what was measured, and in brackets what is printed, the difference and the verdict; of a cell "
    "that nothing measured the brackets alone; behind = what a formula gives; † an average that does not follow from "
    "the cells printed beside it."
)


def digits(one: Filled) -> int:
    """Return the digits behind the point that a number of a cell is shown with: the printed ones, two of a stand-in."""
    return one.cell.digits if one.cell.value and not one.unlike else 2


def measured(one: Filled) -> str:
    """Return the measured number as text, empty if there is none."""
    return "" if one.value is None else f"{one.value:.{digits(one)}f}"


def difference(one: Filled) -> str:
    """Return the difference as text, empty if there is none."""
    return "" if one.difference is None else f"{one.difference:+.{max(digits(one), 1)}f}"


def cell(one: Filled | None) -> str:
    """Return a cell in words."""
    if one is None or (not one.cell.value and one.value is None):
        return "-"
    mark = "†" if one.remark else ""
    formula = "" if one.analytic is None else f" = {one.analytic[0]:.{max(one.cell.digits, 1)}f}"
    printed = f"{one.cell.value or '-'}{mark}{formula}"
    if one.value is None:
        return f"({printed})"
    if one.difference is None:
        return f"{measured(one)} ({printed})"
    return f"{measured(one)} ({printed}, {difference(one)} {one.verdict})"


def title(table: Table) -> str:
    """Return the table's title."""
    paper = table.paper
    return f"{paper.paper}, Table {table.number}: {table.entry.title}"


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
    samples = sorted({one.row.samples for one in table.filled if one.row is not None})
    lines = [f"{len(table.filled)} cells: {counts}"]
    if samples:
        lines.append(f"samples behind a measured cell: {', '.join(f'{one:,}' for one in samples)}")
    yield "Cells", lines
    if table.notes:
        yield "Rows", list(table.notes)
    if table.unreachable():
        yield (
            "Cells that no run fills",
            [f"{count}: {reason}" for reason, count in table.unreachable().items()],
        )
    if table.commands():
        yield "Missing cells, and what fills them", table.commands()


AVERAGES = ("line", "printed", "from the printed cells", "over the same benchmarks", "measured", "")


def averages(table: Table) -> Iterator[tuple[str, ...]]:
    """Yield a line for each average: printed, by the paper's rule, by the consistent one, measured, the remark."""
    for one in table.averaged:
        where = ", ".join(
            part for part in (one.cell.model, one.cell.budget, one.cell.method) if part
        )
        numbers = (one.follows, one.consistent, one.own)
        follows, consistent, own = ("" if value is None else f"{value:.2f}" for value in numbers)
        shared = f"{consistent} ({one.shared})" if consistent else ""
        yield where, one.cell.value or "-", follows, shared, own, one.remark
