"""Text shared by the formats of a table: a cell in words, and the sections below the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from espalier.harness.reports.tables.cell_runs import CellRun
from espalier.harness.reports.tables.cell_verdicts import FilledCell
from espalier.harness.reports.tables.panels import display_name
from espalier.harness.reports.tables.rebuilt_table import RebuiltTable, TableLine
from espalier.harness.specs.commands import RUN
from espalier.harness.store.row_text import MARK, MEANS, mark

LEGEND = (
    "A cell shows the measured value and, in brackets, the printed one, the difference, the verdict and the number n "
    "of samples; without a measurement it has the brackets alone. A value after = or ≠ comes from a formula; ≠ marks "
    "a printed value that is known to be wrong. † marks an average that does not follow from the printed cells, "
    f"{MARK} a score where {MEANS}."
)


#: Title of the section with commands.
MISSING = "Missing cells, and what fills them"


def preset_command(table: RebuiltTable) -> str:
    """Return the command that runs every cell of a table."""
    model = "" if table.model is None else f" model={table.model}"
    return f"{RUN} -m +experiment={table.name}{model}"


def digits(filled: FilledCell) -> int:
    """Return the decimals of a cell's number: those of the printed number, or two for a substitute."""
    return filled.cell.digits if filled.cell.value and not filled.mismatch else 2


def measured(filled: FilledCell) -> str:
    """Return the measured number as text, empty if there is none."""
    return "" if filled.value is None else f"{filled.value:.{digits(filled)}f}{mark(filled.unread)}"


def difference(filled: FilledCell) -> str:
    """Return the difference as text, empty if there is none."""
    return "" if filled.difference is None else f"{filled.difference:+.{max(digits(filled), 1)}f}"


def formula(filled: FilledCell) -> str:
    """Return the formula's value as text, after = or, for a misprint, ≠; empty if there is no formula."""
    if filled.analytic is None:
        return ""
    sign, value = "≠" if filled.analytic.misprint else "=", filled.analytic.value
    # A count that is printed without decimals has none here either, unless the formula's value is not an integer.
    decimals = (
        0 if filled.cell.digits == 0 and value == round(value) else max(filled.cell.digits, 1)
    )
    return f"{sign} {value:.{decimals}f}"


def samples(filled: FilledCell) -> str:
    """Return the number of samples of a measured cell as text; empty if not measured."""
    return "" if filled.row is None else f"n={filled.row.samples:,}"


def parts(filled: FilledCell) -> list[str]:
    """Return a cell with a number as texts: the measured number, or else the printed one, then the details."""
    dagger = "†" if filled.remark else ""
    nothing = "" if filled.value is not None else "-"
    printed = " ".join(filter(None, (f"{filled.cell.value or nothing}{dagger}", formula(filled))))
    if filled.value is None:
        return [printed]
    judged = "" if filled.difference is None else f"{difference(filled)} {filled.verdict}"
    return [measured(filled), *filter(None, (printed, judged, samples(filled)))]


def cell(filled: FilledCell | None) -> str:
    """Return a cell as text."""
    if filled is None or (not filled.cell.value and filled.value is None):
        return "-"
    number_text, *details = parts(filled)
    return (
        f"{number_text} ({', '.join(details)})" if filled.value is not None else f"({number_text})"
    )


def missing(filled: FilledCell) -> str:
    """Return the command that fills a cell without a number, or why there is none; empty if it has a number."""
    if filled.value is not None:
        return ""
    return f"{RUN} {' '.join(filled.run.line)}" if isinstance(filled.run, CellRun) else filled.run


def blocks(table: RebuiltTable) -> Iterator[tuple[tuple[str, ...], list[TableLine]]]:
    """Yield the lines of a table under equal headings."""
    for headings, lines in groupby(table.lines, key=lambda line: line.headings):
        yield headings, list(lines)


def title(table: RebuiltTable) -> str:
    """Return the table's title."""
    paper = table.paper
    return f"{paper.paper}, {display_name(table.number)}: {table.entry.title}"


def source(table: RebuiltTable) -> str:
    """Return the source of the printed numbers."""
    paper = table.paper
    text = f"{paper.title} ({paper.venue}, arXiv {paper.arxiv})."
    if table.model is None:
        return text
    return (
        f"{text} Measured on {table.model} and its benchmarks, which stand for the printed ones: its numbers are not "
        "to be compared with theirs."
    )


def head(column: tuple[str, ...]) -> str:
    """Return a column's heading."""
    return " ".join(part for part in column if part) or "value"


def sections(table: RebuiltTable) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections below a table: a title and lines."""
    yield "Cells", [f"{len(table.filled)} cells: {', '.join(_by_origin(table))}"]
    if table.notes:
        yield "Rows", list(table.notes)
    sources = Counter(
        filled.analytic.source for filled in table.filled if filled.analytic is not None
    )
    if sources:
        yield "Formulas", _counted(sources)
    misprints = Counter(
        filled.analytic.misprint
        for filled in table.filled
        if filled.analytic is not None and filled.analytic.misprint
    )
    if misprints:
        yield "Misprints", _counted(misprints)
    if table.model is None and table.uncompared():
        yield "Cells that are not compared with print", _listed(table.uncompared())
    if table.unreachable():
        yield "Cells that no run fills", _listed(table.unreachable())
    if table.commands():
        yield MISSING, table.commands()


def _by_origin(table: RebuiltTable) -> Iterator[str]:
    """Yield the counts of cells: measured ones with their verdicts, then those of formulas, and the others."""
    measured_cells = Counter(filled.verdict for filled in table.filled if filled.value is not None)
    if measured_cells:
        verdicts = (
            f"{count} {'not compared' if verdict == 'measured' else verdict}"
            for verdict, count in sorted(measured_cells.items())
        )
        yield f"{measured_cells.total()} measured ({', '.join(verdicts)})"
    unmeasured = table.counts - measured_cells
    yield from (f"{count} {verdict}" for verdict, count in sorted(unmeasured.items()))


def _listed(counts: Mapping[str, int]) -> list[str]:
    return [f"{count}: {reason}" for reason, count in counts.items()]


def _counted(counts: Counter[str]) -> list[str]:
    return [
        f"{count} {'cell' if count == 1 else 'cells'}: {reason}" for reason, count in counts.items()
    ]


AVERAGES = ("line", "printed", "from the printed cells", "over the same benchmarks", "measured", "")


def averages(table: RebuiltTable) -> Iterator[tuple[str, ...]]:
    """Yield a line for each average: printed, by the paper's rule, by the uniform rule, measured, the remark."""
    for average in table.averaged:
        line = ", ".join(
            part for part in (average.cell.model, average.cell.budget, average.cell.method) if part
        )
        numbers = (average.follows, average.consistent, average.measured)
        follows, consistent, measured_text = (
            "" if value is None else f"{value:.2f}" for value in numbers
        )
        measured_text += mark(bool(measured_text) and average.unread)
        shared = f"{consistent} ({average.shared})" if consistent else ""
        yield line, average.cell.value or "-", follows, shared, measured_text, average.remark
