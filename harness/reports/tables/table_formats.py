"""A rebuilt table as Markdown, LaTeX (booktabs), HTML and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping

from espalier.harness.errors import plain_page
from espalier.harness.reports.curves.latex_text import escape_latex
from espalier.harness.reports.tables import table_text as wording
from espalier.harness.reports.tables.cell_verdicts import FilledCell
from espalier.harness.reports.tables.printed_cell import COLUMNS
from espalier.harness.reports.tables.rebuilt_table import RebuiltTable, TableLine
from espalier.harness.reports.tables.table_page import page

#: Columns of the CSV after those of the printed cell.
RESULT_COLUMNS = (
    *(
        "measured",
        "stderr",
        "difference",
        "verdict",
        "samples",
        "whole",
        "unread",
        "run_key",
        "analytic",
        "formula",
        "misprint",
    ),
    *("remark", "missing"),
)

#: Lines of a table on a page of LaTeX, including headings.
PAGE_LINES = 40


def markdown(table: RebuiltTable) -> str:
    """Return a table as Markdown, with a heading for each block of lines."""
    heads = [wording.head(column) for column in table.columns]
    parts = [f"# {wording.title(table)}\n", f"{wording.source(table)}\n", f"{wording.LEGEND}\n"]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    for headings, lines in wording.blocks(table):
        if headings:
            rows.append([f"**{', '.join(headings)}**", *[""] * len(heads)])
        rows += [[line.label or "-", *_texts(table, line)] for line in lines]
    parts.append("".join(f"| {' | '.join(row)} |\n" for row in rows))
    average_lines = list(wording.averages(table))
    if average_lines:
        average = table.entry.average
        about = f"{average.why}\n" if average is not None and average.why else ""
        rows = [list(wording.AVERAGES), ["---", *["---:"] * 4, "---"], *map(list, average_lines)]
        parts.append(
            f"## Averages\n\n{about}\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)
        )
    for name, items in wording.sections(table):
        mark = "`" if name.startswith("Missing") else ""
        parts.append(f"## {name}\n\n" + "".join(f"- {mark}{item}{mark}\n" for item in items))
    return plain_page("\n".join(parts))


def latex(table: RebuiltTable) -> str:
    """Return a table for LaTeX with booktabs: cells as in Markdown, unmeasured printed numbers in italics.

    The sections that other formats have below the table follow as comments.
    """
    heads = [wording.head(column) for column in table.columns]
    caption = f"{wording.title(table)}. {wording.source(table)} {wording.LEGEND}"
    out = [r"% needs \usepackage{booktabs,adjustbox}"]
    for number, part in enumerate(_parts(table, len(heads))):
        continued = f"{wording.title(table)}, continued."
        out += [
            r"\begin{table}",
            r"\centering",
            r"\setlength{\belowcaptionskip}{6pt}",
            rf"\caption{{{escape_latex(continued if number else caption)}}}",
            *([] if number else [rf"\label{{tab:{table.name.replace('_', ':')}}}"]),
            r"\begin{adjustbox}{max width=\textwidth}",
            rf"\begin{{tabular}}{{l{'r' * len(heads)}}}",
            r"\toprule",
            " & ".join(["", *map(escape_latex, heads)]) + r" \\",
            *part,
            *(r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}", r"\end{table}"),
        ]
    for name, items in wording.sections(table):
        out += [f"% {name}:", *(f"%   {item}" for item in items)]
    return "\n".join(out) + "\n"


def _parts(table: RebuiltTable, columns: int) -> Iterator[list[str]]:
    """Yield the lines between the rules, in parts of `PAGE_LINES` that fit a page each."""
    part: list[str] = []
    for headings, lines in wording.blocks(table):
        title = r"\midrule"
        if headings:
            title += (
                "\n"
                + rf"\multicolumn{{{columns + 1}}}{{l}}{{{escape_latex(', '.join(headings))}}} \\"
            )
        needs_title = True
        for line in lines:
            if len(part) >= PAGE_LINES:
                yield part
                part, needs_title = [], True
            cells = [_tex_cell(line.cells.get(column)) for column in table.columns]
            part += [title] * needs_title + [
                " & ".join([escape_latex(line.label or "-"), *cells]) + r" \\"
            ]
            needs_title = False
    yield part


def tidy(table: RebuiltTable) -> str:
    """Return a table as CSV, a line for each cell: the printed columns, then those of the result."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([*COLUMNS, *RESULT_COLUMNS])
    for filled in table.filled:
        lines.writerow([*(getattr(filled.cell, name) for name in COLUMNS), *_result_values(filled)])
    return out.getvalue()


#: Functions that write each format, by file ending.
FORMATS: Mapping[str, Callable[[RebuiltTable], str]] = {
    "md": markdown,
    "tex": latex,
    "csv": tidy,
    "html": page,
}


def _texts(table: RebuiltTable, line: TableLine) -> list[str]:
    return [wording.cell(line.cells.get(column)) for column in table.columns]


def _result_values(filled: FilledCell) -> list[str]:
    row = filled.row
    return [
        "" if filled.value is None else f"{filled.value:.6g}",
        "" if filled.stderr is None else f"{filled.stderr:.3g}",
        "" if filled.difference is None else f"{filled.difference:.6g}",
        filled.verdict,
        "" if row is None else str(row.samples),
        "" if row is None else str(row.complete).lower(),
        "" if row is None else str(filled.unread).lower(),
        "" if row is None else row.key,
        "" if filled.analytic is None else f"{filled.analytic.value:.6g}",
        "" if filled.analytic is None else filled.analytic.source,
        "" if filled.analytic is None else filled.analytic.misprint,
        filled.remark,
        wording.missing(filled),
    ]


def _tex_cell(filled: FilledCell | None) -> str:
    if filled is None or (filled.value is None and not filled.cell.value):
        return "--"
    number_text, *details = wording.parts(filled)
    if filled.value is None:
        return rf"\textit{{{escape_latex(number_text)}}}"
    return rf"{escape_latex(number_text)} {{\scriptsize ({escape_latex(', '.join(details))})}}"
