"""A rebuilt table as Markdown, LaTeX (booktabs), HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from espalier.harness.errors import plain_page
from espalier.harness.reports.curves.printed_names import escape_latex
from espalier.harness.reports.tables.cell_runs import CellRun
from espalier.harness.reports.tables.cell_verdicts import FilledCell
from espalier.harness.reports.tables.published_tables import COLUMNS, display_name
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

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1400px;padding:0 1em;color:#1a1a1a}
h1{font-size:1.4em;margin-bottom:.2em}h2{font-size:1.05em;margin:1.6em 0 .3em}p{max-width:60em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:3px 9px;text-align:right;white-space:nowrap;border-bottom:1px solid #e4e4e4;vertical-align:top}
thead th{border-bottom:2px solid #666;background:#fff;vertical-align:bottom;white-space:normal}
tbody th{text-align:left;font-weight:400;position:sticky;left:0;background:#fff}
th.block{font-weight:600;background:#f4f4f4}td small{display:block;color:#555}
td.near{background:#dcefe3}td.within{background:#fdf3d0}td.FAR{background:#f9d9d2}td.measured{background:#e4ecf7}
td.another{background:#efeaf6}td.missing,td.printed,td.derived,td.fitted{color:#666}td.derived,td.fitted{background:#f4f4f4}
.legend td{border:1px solid #ddd}td.text{text-align:left;white-space:normal}
li{margin:.15em 0}code{font-size:.92em;background:#f4f4f4;padding:1px 4px;overflow-wrap:anywhere}
"""


def page(table: RebuiltTable) -> str:
    """Return a table as a page."""
    name = html.escape(title(table))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{name}</title>\n<style>{STYLE}</style>\n{fragment(table)}</html>\n"
    )


def fragment(table: RebuiltTable) -> str:
    """Return the content of a table's page; a cell has its verdict as class, and its command or run as title."""
    name = html.escape(title(table))
    heads = "".join(f"<th>{html.escape(head(column))}</th>" for column in table.columns)
    body = []
    for headings, lines in blocks(table):
        if headings:
            text = html.escape(", ".join(headings))
            body.append(
                f'<tr><th colspan="{len(table.columns) + 1}" class="block">{text}</th></tr>'
            )
        body += [_line(table, line) for line in lines]
    below = []
    average_lines = list(averages(table))
    if average_lines:
        below.append(f"<h2>Averages</h2>{plain_table(AVERAGES, average_lines)}")
    for heading, section_items in sections(table):
        items = [html.escape(item) for item in section_items]
        if heading == MISSING:
            below.append(_missing(table, items))
        else:
            listed = "".join(f"<li>{item}</li>" for item in items)
            below.append(f"<h2>{html.escape(heading)}</h2><ul>{listed}</ul>")
    legend = "".join(f'<td class="{kind}">{text}</td>' for kind, text in CLASSES.items())
    return (
        f"<h1>{name}</h1>\n"
        f"<p>{html.escape(source(table))}</p><p>{html.escape(LEGEND)}</p>\n"
        f'<div class="wide"><table class="legend"><tr>{legend}</tr></table></div><br>\n'
        f'<div class="wide"><table><thead><tr><th></th>{heads}</tr></thead><tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>\n"
        + "\n".join(below)
    )


def _missing(table: RebuiltTable, commands: Sequence[str]) -> str:
    """Return what fills missing cells: the preset, and folded the command of each line, already escaped."""
    preset = html.escape(preset_command(table))
    listed = "".join(f"<li><code>{item}</code></li>" for item in commands)
    count = "1 command" if len(commands) == 1 else f"{len(commands)} commands"
    return (
        f"<h2>{MISSING}</h2><p><code>{preset}</code></p>"
        f"<details><summary>{count}, each for one method at one budget</summary><ul>{listed}</ul></details>"
    )


def _line(table: RebuiltTable, line: TableLine) -> str:
    cells = "".join(_cell(line.cells.get(column)) for column in table.columns)
    return f"<tr><th>{html.escape(line.label or '-')}</th>{cells}</tr>"


def _cell(filled: FilledCell | None) -> str:
    if filled is None or (not filled.cell.value and filled.value is None):
        return "<td>-</td>"
    origin = f"{filled.row.key}, {filled.row.samples} samples" if filled.row else missing(filled)
    kind = filled.verdict.split(",")[0].split()[0]
    number_text, *details = parts(filled)
    small = f"<small>{html.escape(', '.join(details))}</small>" if details else ""
    return (
        f'<td class="{kind}" title="{html.escape(origin)}">{html.escape(number_text)}{small}</td>'
    )


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts; the first cell of a row is its heading."""
    header = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr><th>{html.escape(row[0])}</th>"
        + "".join(f"<td>{html.escape(text)}</td>" for text in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'


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
    heads = [head(column) for column in table.columns]
    parts = [f"# {title(table)}\n", f"{source(table)}\n", f"{LEGEND}\n"]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    for headings, lines in blocks(table):
        if headings:
            rows.append([f"**{', '.join(headings)}**", *[""] * len(heads)])
        rows += [[line.label or "-", *_texts(table, line)] for line in lines]
    parts.append("".join(f"| {' | '.join(row)} |\n" for row in rows))
    average_lines = list(averages(table))
    if average_lines:
        average = table.entry.average
        about = f"{average.why}\n" if average is not None and average.why else ""
        rows = [list(AVERAGES), ["---", *["---:"] * 4, "---"], *map(list, average_lines)]
        parts.append(
            f"## Averages\n\n{about}\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)
        )
    for name, items in sections(table):
        mark = "`" if name.startswith("Missing") else ""
        parts.append(f"## {name}\n\n" + "".join(f"- {mark}{item}{mark}\n" for item in items))
    return plain_page("\n".join(parts))


def latex(table: RebuiltTable) -> str:
    """Return a table for LaTeX with booktabs: cells as in Markdown, unmeasured printed numbers in italics.

    The sections that other formats have below the table follow as comments.
    """
    heads = [head(column) for column in table.columns]
    caption = f"{title(table)}. {source(table)} {LEGEND}"
    out = [r"% needs \usepackage{booktabs,adjustbox}"]
    for number, part in enumerate(_parts(table, len(heads))):
        continued = f"{title(table)}, continued."
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
    for name, items in sections(table):
        out += [f"% {name}:", *(f"%   {item}" for item in items)]
    return "\n".join(out) + "\n"


def _parts(table: RebuiltTable, columns: int) -> Iterator[list[str]]:
    """Yield the lines between the rules, in parts of `PAGE_LINES` that fit a page each."""
    part: list[str] = []
    for headings, lines in blocks(table):
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
    return [cell(line.cells.get(column)) for column in table.columns]


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
        missing(filled),
    ]


def _tex_cell(filled: FilledCell | None) -> str:
    if filled is None or (filled.value is None and not filled.cell.value):
        return "--"
    number_text, *details = parts(filled)
    if filled.value is None:
        return rf"\textit{{{escape_latex(number_text)}}}"
    return rf"{escape_latex(number_text)} {{\scriptsize ({escape_latex(', '.join(details))})}}"
