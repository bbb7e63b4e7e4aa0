"""A rebuilt table as Markdown, LaTeX (booktabs), HTML and CSV."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from espalier.harness.errors import plain_page
from espalier.harness.reports.printed_text import TEMPLATES, escape_latex, render
from espalier.harness.reports.tables.cell_verdicts import FilledCell
from espalier.harness.reports.tables.rebuilt_table import RebuiltTable, TableLine
from espalier.harness.store.row_text import MARK, MEANS, mark

LEGEND = (
    "A cell shows the measured value and, in brackets, the printed one, the difference, the verdict and the number n "
    "of samples; without a measurement it has the brackets alone. A value after = or ≠ comes from a formula; ≠ marks "
    "a printed value that is known to be wrong. † marks an average that does not follow from the printed cells, "
    f"{MARK} a score where {MEANS}."
)

#: Title of the section with commands.
MISSING = "Missing cells, and what fills them"

#: Columns of the averages below a table.
AVERAGES = ("line", "printed", "from the printed cells", "over the same benchmarks", "measured", "")

#: CSS classes of cells by verdict, in the order of the legend, with their meaning.
CLASSES = {
    "near": "near print",
    "within": "within 1.96 standard errors",
    "FAR": "far from print",
    "measured": "measured, not compared",
    "another": "another machine",
    "missing": "a run fills it",
    "derived": "a formula gives it",
    "fitted": "a formula fitted to such cells gives it",
    "printed": "printed alone",
}

#: How columns of a table's frame are written in CSV.
CSV_TEXTS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("measured", "difference", "analytic"), "{:.6g}".format),
    "stderr": "{:.3g}".format,
    **dict.fromkeys(("whole", "unread"), lambda flag: str(flag).lower()),
}

#: Lines of a table on a page of LaTeX, including headings.
PAGE_LINES = 40


def parts(filled: FilledCell) -> list[str]:
    """Return a cell with a number as texts: the measured number, or else the printed one, then the details."""
    dagger, nothing = "†" if filled.remark else "", "" if filled.value is not None else "-"
    printed = f"{filled.cell.value or nothing}{dagger} {_formula(filled)}".strip()
    if filled.value is None:
        return [printed]
    # The decimals of the printed number, or two for a substitute.
    digits = filled.cell.digits if filled.cell.value and not filled.mismatch else 2
    change = filled.difference
    judged = "" if change is None else f"{change:+.{max(digits, 1)}f} {filled.verdict}"
    samples = "" if filled.row is None else f"n={filled.row.samples:,}"
    measured = f"{filled.value:.{digits}f}{mark(filled.unread)}"
    return [measured, *filter(None, (printed, judged, samples))]


def _formula(filled: FilledCell) -> str:
    """Return the formula's value as text, after = or, for a misprint, ≠; empty if there is no formula."""
    if filled.analytic is None:
        return ""
    sign, value = "≠" if filled.analytic.misprint else "=", filled.analytic.value
    # A count that is printed without decimals has none here either, unless the formula's value is not an integer.
    is_count = filled.cell.digits == 0 and value == round(value)
    return f"{sign} {value:.{0 if is_count else max(filled.cell.digits, 1)}f}"


def cell(filled: FilledCell | None) -> str:
    """Return a cell as text."""
    if filled is None or not filled.has_number:
        return "-"
    number, *details = parts(filled)
    return f"({number})" if filled.value is None else f"{number} ({', '.join(details)})"


def _tex_cell(filled: FilledCell | None) -> str:
    """Return a cell for LaTeX, a number that is only printed in italics."""
    if filled is None or not filled.has_number:
        return "--"
    number, *details = map(escape_latex, parts(filled))
    if filled.value is None:
        return rf"\textit{{{number}}}"
    return rf"{number} {{\scriptsize ({', '.join(details)})}}"


def _blocks(lines: Iterable[TableLine]) -> list[tuple[tuple[str, ...], list[TableLine]]]:
    """Return the lines under equal headings."""
    return [(headings, [*group]) for headings, group in groupby(lines, lambda line: line.headings)]


def _pages(table: RebuiltTable) -> Iterator[list[TableLine]]:
    """Yield the lines in parts that fit a page of LaTeX each."""
    page: list[TableLine] = []
    size = 0
    for line in table.lines:
        if size >= PAGE_LINES:
            yield page
            page, size = [], 0
        size += 1 + (not page or page[-1].headings != line.headings)
        page.append(line)
    yield page


TEMPLATES.filters |= {
    "blocks": _blocks,
    "cell": cell,
    "parts": parts,
    "tex_cell": _tex_cell,
}


def _sections(table: RebuiltTable) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections below a table: a title and lines."""
    yield "Cells", [f"{len(table.filled)} cells: {', '.join(_by_origin(table))}"]
    yield "Rows", [*table.notes]
    formulas = [filled.analytic for filled in table.filled if filled.analytic is not None]
    for title, texts in (
        ("Formulas", [formula.source for formula in formulas]),
        ("Misprints", [formula.misprint for formula in formulas if formula.misprint]),
    ):
        counts = Counter(texts).items()
        yield title, [f"{n} {'cell' if n == 1 else 'cells'}: {reason}" for reason, n in counts]
    printed = [filled for filled in table.filled if filled.cell.value]
    uncompared = [filled.mismatch for filled in printed if filled.mismatch and table.model is None]
    unreachable = [
        filled.run for filled in printed if isinstance(filled.run, str) and filled.analytic is None
    ]
    for title, reasons in (
        ("Cells that are not compared with print", uncompared),
        ("Cells that no run fills", unreachable),
    ):
        yield title, [f"{count}: {reason}" for reason, count in Counter(reasons).items()]
    yield MISSING, table.commands()


def _by_origin(table: RebuiltTable) -> Iterator[str]:
    """Yield the counts of cells: measured ones with their verdicts, then those of formulas, and the others."""
    measured = Counter(filled.verdict for filled in table.filled if filled.value is not None)
    if measured:
        verdicts = (
            f"{count} {'not compared' if verdict == 'measured' else verdict}"
            for verdict, count in sorted(measured.items())
        )
        yield f"{measured.total()} measured ({', '.join(verdicts)})"
    unmeasured = Counter(filled.verdict for filled in table.filled) - measured
    yield from (f"{count} {verdict}" for verdict, count in sorted(unmeasured.items()))


def _averages(table: RebuiltTable) -> Iterator[tuple[str, ...]]:
    """Yield a line for each average: printed, by the paper's rule, by the uniform rule, measured, the remark."""
    for average in table.averaged:
        printed = average.cell
        line = ", ".join(filter(None, (printed.model, printed.budget, printed.method)))
        follows, consistent, measured = (
            "" if value is None else f"{value:.2f}"
            for value in (average.follows, average.consistent, average.measured)
        )
        measured += mark(bool(measured) and average.unread)
        shared = f"{consistent} ({average.shared})" if consistent else ""
        yield line, printed.value or "-", follows, shared, measured, average.remark


def _rendered(template: str, table: RebuiltTable, **values: Any) -> str:
    return render(
        template,
        table=table,
        legend=LEGEND,
        missing=MISSING,
        average_heads=AVERAGES,
        averages=[*_averages(table)],
        sections=[section for section in _sections(table) if section[1]],
        classes=CLASSES,
        **values,
    )


def fragment(table: RebuiltTable) -> str:
    """Return the content of a table's page; a cell has its verdict as class, and its command or run as title."""
    return _rendered("table_fragment.html", table)


def tidy(table: RebuiltTable) -> str:
    """Return a table's frame as CSV."""
    out = io.StringIO()
    texts = {
        name: table.frame[name].map(text, na_action="ignore") for name, text in CSV_TEXTS.items()
    }
    table.frame.assign(**texts).to_csv(out, index=False, lineterminator="\n")
    return out.getvalue()


#: Functions that write each format, by file ending. The sections that other formats have below a table are comments
#: of the one for LaTeX.
FORMATS: Mapping[str, Callable[[RebuiltTable], str]] = {
    "md": lambda table: plain_page(_rendered("table.md", table)),
    "tex": lambda table: _rendered("table.tex", table, pages=[*_pages(table)]),
    "csv": tidy,
    "html": lambda table: _rendered("table.html", table),
}
