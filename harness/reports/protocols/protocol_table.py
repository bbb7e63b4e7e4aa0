"""The table of a protocol: lines of numbers with intervals, and the plots drawn from them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from espalier.harness.errors import plain_page
from espalier.harness.reports.curves.curve_files import SUFFIXES
from espalier.harness.reports.curves.curve_table import markdown_table
from espalier.harness.reports.curves.figures import Plot, draw, save
from espalier.harness.reports.curves.latex_text import escape_latex
from espalier.harness.reports.tables.table_page import plain_table
from espalier.harness.stats import Interval

#: A cell: a text, a count, a number, or a number with its interval; None where there is none.
Cell = str | int | float | Interval | None


@dataclass(frozen=True)
class ProtocolTable:
    """The result of a protocol.

    Attributes:
        name: of the protocol, the end of its files' names.
        title: heading.
        words: paragraphs above the table: what its columns are, and what of the protocol is not matched.
        lines: cells by column; all lines have the columns of the first.
        plots: drawn side by side with equal axes.
        percent: whether numbers are shares, printed in percent.
    """

    name: str
    title: str
    words: Sequence[str]
    lines: Sequence[Mapping[str, Cell]]
    plots: Sequence[Plot]
    percent: bool = True

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.lines[0])

    @property
    def cells(self) -> list[list[str]]:
        """The cells of each line, as printed."""
        return [[self._printed(line[head]) for head in self.heads] for line in self.lines]

    def fragment(self) -> str:
        """Return the table as a section of a page."""
        words = "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in self.words)
        return f"<h1>{html.escape(self.title)}</h1>\n{words}\n{plain_table(self.heads, self.cells)}"

    def write(self, out: Path) -> list[Path]:
        """Write `<out>-<name>.png`, `.svg`, `.md`, `.tex` and `.csv`, and return the paths."""
        out = out.with_name(f"{out.name}-{self.name}")
        out.parent.mkdir(parents=True, exist_ok=True)
        pictures = save(draw(self.plots, self.title, columns=3, shared=True), out)
        table, latex, numbers = (out.with_name(f"{out.name}.{kind}") for kind in SUFFIXES[2:])
        align = "".join("l" if isinstance(cell, str) else "r" for cell in self.lines[0].values())
        parts = [f"# {self.title}", *self.words, markdown_table(self.heads, self.cells, align)]
        table.write_text(plain_page("\n\n".join(parts)), encoding="utf-8")
        latex.write_text(self._latex(align), encoding="utf-8")
        pd.DataFrame(map(_numbers, self.lines)).to_csv(numbers, index=False, encoding="utf-8")
        return [*pictures, table, latex, numbers]

    def _printed(self, cell: Cell) -> str:
        if isinstance(cell, Interval):
            return cell.percent if self.percent else _decimals(cell)
        if isinstance(cell, float):
            return f"{100 * cell:.1f}" if self.percent else f"{cell:.2f}"
        return "-" if cell is None else str(cell)

    def _latex(self, align: str) -> str:
        rows = [" & ".join(map(escape_latex, row)) + r" \\" for row in (self.heads, *self.cells)]
        out = [r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{align}}}", r"\toprule"]
        out += [rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}"]
        return "\n".join(out) + "\n"


def _decimals(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _numbers(line: Mapping[str, Cell]) -> dict[str, str | float | None]:
    """Return a line for a program: an interval has three columns."""
    numbers: dict[str, str | float | None] = {}
    for name, cell in line.items():
        if isinstance(cell, Interval):
            numbers |= {name: cell.value, f"{name}_low": cell.low, f"{name}_high": cell.high}
        else:
            numbers[name] = cell
    return numbers
