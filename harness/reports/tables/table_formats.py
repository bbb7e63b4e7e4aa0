"""A rebuilt table in Markdown, LaTeX (booktabs), HTML and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping

from espalier.harness.errors import plain_page
from espalier.harness.reports.tables import table_text as wording
from espalier.harness.reports.tables.cell_verdicts import Filled
from espalier.harness.reports.tables.printed_cell import COLUMNS
from espalier.harness.reports.tables.rebuilt_table import Line, Table
from espalier.harness.reports.tables.table_page import page

#: What a line of the CSV says beside the printed cell.
BESIDE = (
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

#: Lines of a table that fit a page of LaTeX, headings included.
LONGEST = 40

#: Letters that TeX reads as orders, with what prints them.
TEX = str.maketrans(
    {
        **{one: f"\\{one}" for one in "%&$#_{}"},
        "†": r"\dag{}",
        "‡": r"\ddag{}",
        "≠": r"$\neq$",
        "²": r"\textsuperscript{2}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
    }
)


def markdown(table: Table) -> str:
    """Return a table as Markdown, with a heading for each block of lines."""
    heads = [wording.head(column) for column in table.columns]
    parts = [f"# {wording.title(table)}\n", f"{wording.source(table)}\n", f"{wording.LEGEND}\n"]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    for headings, lines in wording.blocks(table):
        if headings:
            rows.append([f"**{', '.join(headings)}**", *[""] * len(heads)])
        rows += [[line.label or "-", *_texts(table, line)] for line in lines]
    parts.append("".join(f"| {' | '.join(row)} |\n" for row in rows))
    found = list(wording.averages(table))
    if found:
        average = table.entry.average
        about = f"{average.why}\n" if average is not None and average.why else ""
        rows = [list(wording.AVERAGES), ["---", *["---:"] * 4, "---"], *map(list, found)]
        parts.append(
            f"## Averages\n\n{about}\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)
        )
    for name, said in wording.said(table):
        mark = "`" if name.startswith("Missing") else ""
        parts.append(f"## {name}\n\n" + "".join(f"- {mark}{one}{mark}\n" for one in said))
    return plain_page("\n".join(parts))


def latex(table: Table) -> str:
    """Return a table for LaTeX with booktabs: cells as in Markdown, a number that is printed alone in italics.

    What stands under a table in other formats follows in comments.
    """
    heads = [wording.head(column) for column in table.columns]
    caption = f"{wording.title(table)}. {wording.source(table)} {wording.LEGEND}"
    out = [r"% needs \usepackage{booktabs,adjustbox}"]
    for number, part in enumerate(_parts(table, len(heads))):
        again = f"{wording.title(table)}, continued."
        out += [
            r"\begin{table}",
            rf"\caption{{{_tex(again if number else caption)}}}",
            *([] if number else [rf"\label{{tab:{table.name.replace('_', ':')}}}"]),
            r"\begin{adjustbox}{max width=\textwidth}",
            rf"\begin{{tabular}}{{l{'r' * len(heads)}}}",
            r"\toprule",
            " & ".join(["", *map(_tex, heads)]) + r" \\",
            *part,
            *(r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}", r"\end{table}"),
        ]
    for name, said in wording.said(table):
        out += [f"% {name}:", *(f"%   {one}" for one in said)]
    return "\n".join(out) + "\n"


def _parts(table: Table, columns: int) -> Iterator[list[str]]:
    """Yield the lines between the rules, in parts of :data:`LONGEST` that fit a page each."""
    part: list[str] = []
    for headings, lines in wording.blocks(table):
        title = r"\midrule"
        if headings:
            title += "\n" + rf"\multicolumn{{{columns + 1}}}{{l}}{{{_tex(', '.join(headings))}}} \\"
        fresh = True
        for line in lines:
            if len(part) >= LONGEST:
                yield part
                part, fresh = [], True
            cells = [_tex_cell(line.cells.get(column)) for column in table.columns]
            part += [title] * fresh + [" & ".join([_tex(line.label or "-"), *cells]) + r" \\"]
            fresh = False
    yield part


def tidy(table: Table) -> str:
    """Return a table as CSV, a line a cell: the printed columns, and all that is known beside them."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([*COLUMNS, *BESIDE])
    for one in table.filled:
        lines.writerow([*(getattr(one.cell, name) for name in COLUMNS), *_beside(one)])
    return out.getvalue()


#: How each format is written, by the ending of its files.
FORMATS: Mapping[str, Callable[[Table], str]] = {
    "md": markdown,
    "tex": latex,
    "csv": tidy,
    "html": page,
}


def _texts(table: Table, line: Line) -> list[str]:
    return [wording.cell(line.cells.get(column)) for column in table.columns]


def _beside(one: Filled) -> list[str]:
    row = one.row
    return [
        "" if one.value is None else f"{one.value:.6g}",
        "" if one.stderr is None else f"{one.stderr:.3g}",
        "" if one.difference is None else f"{one.difference:.6g}",
        one.verdict,
        "" if row is None else str(row.samples),
        "" if row is None else str(row.whole).lower(),
        "" if row is None else str(one.unread).lower(),
        "" if row is None else row.key,
        "" if one.analytic is None else f"{one.analytic.value:.6g}",
        "" if one.analytic is None else one.analytic.source,
        "" if one.analytic is None else one.analytic.misprint,
        one.remark,
        wording.missing(one),
    ]


def _tex(text: str) -> str:
    return text.translate(TEX)


def _tex_cell(one: Filled | None) -> str:
    if one is None or (one.value is None and not one.cell.value):
        return "--"
    shown, *rest = wording.parts(one)
    if one.value is None:
        return rf"\textit{{{_tex(shown)}}}"
    return rf"{_tex(shown)} {{\scriptsize ({_tex(', '.join(rest))})}}"
