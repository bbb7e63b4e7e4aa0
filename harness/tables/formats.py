"""A rebuilt table in Markdown, LaTeX (booktabs), HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

from harness.tables import wording
from harness.tables.filling import Filled
from harness.tables.published import COLUMNS
from harness.tables.table import Line, Table
from harness.tables.wanted import Wanted

#: What a line of the CSV says beside the printed cell.
BESIDE = (
    *(
        "measured",
        "stderr",
        "difference",
        "verdict",
        "samples",
        "whole",
        "run_key",
        "analytic",
        "formula",
    ),
    *("remark", "missing"),
)

#: Letters that TeX reads as orders, with what prints them.
TEX = str.maketrans(
    {
        **{one: f"\\{one}" for one in "%&$#_{}"},
        "†": r"\dag{}",
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
    for headings, lines in _blocks(table):
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
    return "\n".join(parts)


def latex(table: Table) -> str:
    """Return a table for LaTeX with booktabs: measured numbers, or the printed ones in italics."""
    heads = [wording.head(column) for column in table.columns]
    out = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        rf"\caption{{{_tex(wording.title(table))}. {_tex(wording.source(table))} Printed numbers in italics.}}",
        rf"\label{{tab:{table.name.replace('_', ':')}}}",
        rf"\begin{{tabular}}{{l{'r' * len(heads)}}}",
        r"\toprule",
        " & ".join(["", *map(_tex, heads)]) + r" \\",
    ]
    for headings, lines in _blocks(table):
        out.append(r"\midrule")
        if headings:
            out.append(rf"\multicolumn{{{len(heads) + 1}}}{{l}}{{{_tex(', '.join(headings))}}} \\")
        for line in lines:
            cells = [_tex_cell(line.cells.get(column)) for column in table.columns]
            out.append(" & ".join([_tex(line.label or "-"), *cells]) + r" \\")
    out += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(out) + "\n"


def page(table: Table) -> str:
    """Return a table as a page of HTML; a cell's colour is its verdict, its title the command or the run behind it."""
    heads = "".join(f"<th>{html.escape(wording.head(column))}</th>" for column in table.columns)
    body = []
    for headings, lines in _blocks(table):
        if headings:
            text = html.escape(", ".join(headings))
            body.append(
                f'<tr><th colspan="{len(table.columns) + 1}" class="block">{text}</th></tr>'
            )
        for line in lines:
            cells = "".join(_html_cell(line.cells.get(column)) for column in table.columns)
            body.append(f"<tr><th>{html.escape(line.label or '-')}</th>{cells}</tr>")
    sections = []
    found = list(wording.averages(table))
    if found:
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in (wording.AVERAGES, *found)
        )
        sections.append(f"<h2>Averages</h2><table>{rows}</table>")
    for name, said in wording.said(table):
        items = "".join(f"<li>{html.escape(one)}</li>" for one in said)
        sections.append(f"<h2>{html.escape(name)}</h2><ul>{items}</ul>")
    about = html.escape(f"{wording.source(table)} {wording.LEGEND}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(wording.title(table))}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{html.escape(wording.title(table))}</h1><p>{about}</p>\n"
        f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>\n"
        + "\n".join(body)
        + "\n</tbody></table>\n"
        + "\n".join(sections)
        + "</html>\n"
    )


STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:2px 8px;text-align:right}"
    "th:first-child,th.block{text-align:left}th.block{border-top:1px solid #888}.near{background:#dff0d8}"
    ".within{background:#fcf8e3}.FAR{background:#f2dede}.missing,.printed{color:#777}"
)


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


def _blocks(table: Table) -> Iterator[tuple[tuple[str, ...], list[Line]]]:
    for headings, lines in groupby(table.lines, key=lambda line: line.headings):
        yield headings, list(lines)


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
        "" if row is None else row.key,
        "" if one.analytic is None else f"{one.analytic[0]:.6g}",
        "" if one.analytic is None else one.analytic[1],
        one.remark,
        _missing(one),
    ]


def _missing(one: Filled) -> str:
    """Return the command that fills a cell without a number, or why there is none."""
    if one.value is not None:
        return ""
    return f"python run.py {' '.join(one.run.line)}" if isinstance(one.run, Wanted) else one.run


def _tex(text: str) -> str:
    return text.translate(TEX)


def _tex_cell(one: Filled | None) -> str:
    if one is None or (one.value is None and not one.cell.value):
        return "--"
    mark = r"\dag{}" if one.remark else ""
    if one.value is None:
        return rf"\textit{{{one.cell.value}}}{mark}"
    return f"{wording.measured(one)}{mark}"


def _html_cell(one: Filled | None) -> str:
    if one is None:
        return "<td>-</td>"
    title = _missing(one) if one.row is None else f"{one.row.key}, {one.row.samples} samples"
    kind = one.verdict.split(",")[0].split()[0]
    return f'<td class="{kind}" title="{html.escape(title)}">{html.escape(wording.cell(one))}</td>'
