"""A rebuilt table as a page of HTML that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from espalier.harness.reports.tables import table_text as wording
from espalier.harness.reports.tables.cell_verdicts import Filled
from espalier.harness.reports.tables.rebuilt_table import Line, Table

#: Verdicts as classes of cells, in the order of the legend, with what they say.
CLASSES = {
    "near": "near print",
    "within": "within 1.96 standard errors",
    "FAR": "far from print",
    "measured": "measured, not compared",
    "another": "another machine",
    "missing": "a run fills it",
    "formula": "a formula gives it",
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
td.another{background:#efeaf6}td.missing,td.printed,td.formula{color:#777}td.formula{background:#f4f4f4}
.legend td{border:1px solid #ddd}td.text{text-align:left;white-space:normal}
li{margin:.15em 0}code{font-size:.92em;background:#f4f4f4;padding:1px 4px;overflow-wrap:anywhere}
"""


def page(table: Table) -> str:
    """Return a table as a page."""
    title = html.escape(wording.title(table))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{fragment(table)}</html>\n"
    )


def fragment(table: Table) -> str:
    """Return what a page says of a table; a cell's class is its verdict, its title the command or the run behind it."""
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
    found = list(wording.averages(table))
    if found:
        sections.append(f"<h2>Averages</h2>{_plain(wording.AVERAGES, found)}")
    for name, said in wording.said(table):
        tag = ("<code>", "</code>") if name.startswith("Missing") else ("", "")
        items = "".join(f"<li>{tag[0]}{html.escape(one)}{tag[1]}</li>" for one in said)
        sections.append(f"<h2>{html.escape(name)}</h2><ul>{items}</ul>")
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


def _line(table: Table, line: Line) -> str:
    cells = "".join(_cell(line.cells.get(column)) for column in table.columns)
    return f"<tr><th>{html.escape(line.label or '-')}</th>{cells}</tr>"


def _cell(one: Filled | None) -> str:
    if one is None or (not one.cell.value and one.value is None):
        return "<td>-</td>"
    behind = f"{one.row.key}, {one.row.samples} samples" if one.row else wording.missing(one)
    kind = one.verdict.split(",")[0].split()[0]
    shown, *rest = wording.parts(one)
    small = f"<small>{html.escape(', '.join(rest))}</small>" if rest else ""
    return f'<td class="{kind}" title="{html.escape(behind)}">{html.escape(shown)}{small}</td>'


def _plain(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr><th>{html.escape(row[0])}</th>"
        + "".join(f"<td>{html.escape(text)}</td>" for text in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )
