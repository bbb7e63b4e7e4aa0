"""A rebuilt table as a self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from espalier.harness.reports.tables import table_text as wording
from espalier.harness.reports.tables.cell_verdicts import FilledCell
from espalier.harness.reports.tables.rebuilt_table import RebuiltTable, TableLine

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
    title = html.escape(wording.title(table))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{fragment(table)}</html>\n"
    )


def fragment(table: RebuiltTable) -> str:
    """Return the content of a table's page; a cell has its verdict as class, and its command or run as title."""
    title = html.escape(wording.title(table))
    heads = "".join(f"<th>{html.escape(wording.head(column))}</th>" for column in table.columns)
    body = []
    for headings, lines in wording.blocks(table):
        if headings:
            text = html.escape(", ".join(headings))
            body.append(
                f'<tr><th colspan="{len(table.columns) + 1}" class="block">{text}</th></tr>'
            )
        body += [_line(table, line) for line in lines]
    sections = []
    average_lines = list(wording.averages(table))
    if average_lines:
        sections.append(f"<h2>Averages</h2>{plain_table(wording.AVERAGES, average_lines)}")
    for name, section_items in wording.sections(table):
        items = [html.escape(item) for item in section_items]
        if name == wording.MISSING:
            sections.append(_missing(table, items))
        else:
            listed = "".join(f"<li>{item}</li>" for item in items)
            sections.append(f"<h2>{html.escape(name)}</h2><ul>{listed}</ul>")
    legend = "".join(f'<td class="{kind}">{text}</td>' for kind, text in CLASSES.items())
    return (
        f"<h1>{title}</h1>\n"
        f"<p>{html.escape(wording.source(table))}</p><p>{html.escape(wording.LEGEND)}</p>\n"
        f'<div class="wide"><table class="legend"><tr>{legend}</tr></table></div><br>\n'
        f'<div class="wide"><table><thead><tr><th></th>{heads}</tr></thead><tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>\n"
        + "\n".join(sections)
    )


def _missing(table: RebuiltTable, commands: Sequence[str]) -> str:
    """Return what fills missing cells: the preset, and folded the command of each line, already escaped."""
    preset = html.escape(wording.preset_command(table))
    listed = "".join(f"<li><code>{item}</code></li>" for item in commands)
    count = "1 command" if len(commands) == 1 else f"{len(commands)} commands"
    return (
        f"<h2>{wording.MISSING}</h2><p><code>{preset}</code></p>"
        f"<details><summary>{count}, each for one method at one budget</summary><ul>{listed}</ul></details>"
    )


def _line(table: RebuiltTable, line: TableLine) -> str:
    cells = "".join(_cell(line.cells.get(column)) for column in table.columns)
    return f"<tr><th>{html.escape(line.label or '-')}</th>{cells}</tr>"


def _cell(filled: FilledCell | None) -> str:
    if filled is None or (not filled.cell.value and filled.value is None):
        return "<td>-</td>"
    origin = (
        f"{filled.row.key}, {filled.row.samples} samples" if filled.row else wording.missing(filled)
    )
    kind = filled.verdict.split(",")[0].split()[0]
    number_text, *details = wording.parts(filled)
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
