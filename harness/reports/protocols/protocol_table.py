"""What protocols share: the runs of a benchmark that they compare, and the table and figure that they write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from espalier.harness.errors import UserError, plain_page
from espalier.harness.reports.curves.comparison import ComparedRuns, MethodPoint, runs_of
from espalier.harness.reports.curves.curve_files import SUFFIXES
from espalier.harness.reports.curves.curve_points import CONTROLS, share
from espalier.harness.reports.curves.figures import Plot, Series, Spot, draw, percent_spot, save
from espalier.harness.reports.curves.stored_rows import RunScores, with_settings
from espalier.harness.reports.frame import StoredResult
from espalier.harness.reports.printed_text import markdown_table, render
from espalier.harness.specs.commands import RUN
from espalier.harness.specs.comparable import grouped
from espalier.harness.stats import Interval
from espalier.harness.store.row_text import amount_text


def grouped_runs(results: Sequence[StoredResult]) -> list[ComparedRuns]:
    """Return the runs of a selection, ordered by model, rule and benchmark.

    Raises:
        UserError: the runs of a benchmark differ in a setting that must be the same, or lack scores of samples.
    """
    keys = ("model", "budget_rule", "benchmark")
    groups = grouped(
        (tuple(result.row[key] for key in keys), result) for result in with_settings(results)[0]
    )
    return [runs_of(key[2], group, swept=True) for key, group in sorted(groups.items())]


def kept_text(point: MethodPoint) -> str:
    """Return what a method keeps at a point: a share in percent, or a number of tokens."""
    _, ratio, count = point
    return share(ratio) if count is None else amount_text(ratio, count)


def method_text(point: MethodPoint, runs: Sequence[RunScores]) -> str:
    """Return the name of a method, and whether it is a control, which no paper proposes."""
    return point[0] + " (control)" * (runs[0].row["method"] in CONTROLS)


def nothing_to_show(protocol: str, lacks: str, command: str) -> UserError:
    """Return the error of a protocol that a selection has no runs for."""
    return UserError(
        f"--protocol={protocol} needs {lacks} among the selected results; valid: a store of `{RUN} {command}`"
    )


#: A cell: a text, a count, a number, or a number with its interval; None where there is none.
Cell = str | int | float | Interval | None
Line = Mapping[str, Cell]


def frame_of(lines: Iterable[Line]) -> pd.DataFrame:
    """Return lines as a frame of the columns of the first; cells keep their types."""
    return pd.DataFrame(lines, dtype=object)


def spots(rows: Iterable[int], cells: Iterable[Cell]) -> list[Spot]:
    """Return the intervals among cells, in percent, each in its row."""
    pairs = zip(rows, cells, strict=True)
    return [percent_spot(row, cell) for row, cell in pairs if isinstance(cell, Interval)]


def plots_by_method(
    lines: pd.DataFrame, by: Sequence[str], looks: Mapping[str, Mapping[str, Any]], values: str
) -> list[Plot]:
    """Return a plot for each group of lines, with a row for each method, and a mark for each column.

    Args:
        lines: of a table.
        by: the columns that group them; their values are the title; the model is apart from two others.
        looks: of the marks by column; methods with the largest means of the first one come first.
        values: label of the axis.
    """
    scores = [
        cell.value if isinstance(cell, Interval) else 0.0 for cell in lines[next(iter(looks))]
    ]
    means = pd.Series(scores).groupby(lines["method"], sort=False).mean()
    names = [*means.sort_values(ascending=False, kind="stable").index]
    ticks: dict[float, str] = dict(enumerate(names))
    plots = []
    for group, part in lines.groupby([*by], sort=False):
        rows = [*map(names.index, part["method"])]
        series = [
            Series(column, spots(rows, part[column]), look, key=len(looks) > 1)
            for column, look in looks.items()
        ]
        title, note = ", ".join(group[-2:]), ", ".join(group[:-2])
        plots.append(Plot("dots", title, series, note, values=values, ticks=ticks))
    return plots


@dataclass(frozen=True)
class ProtocolTable:
    """The result of a protocol.

    Attributes:
        name: of the protocol, the end of its files' names.
        title: heading.
        words: paragraphs above the table: what its columns are, and what of the protocol is not matched.
        lines: the cells, as `frame_of` makes them.
        plots: drawn side by side with equal axes.
        percent: whether numbers are shares, printed in percent.
    """

    name: str
    title: str
    words: Sequence[str]
    lines: pd.DataFrame
    plots: Sequence[Plot]
    percent: bool = True

    @property
    def heads(self) -> list[str]:
        """Names of the columns."""
        return [*self.lines]

    @property
    def cells(self) -> list[list[str]]:
        """The cells of each line, as printed."""
        return [[*map(self._printed, line)] for line in self.lines.to_numpy()]

    def fragment(self) -> str:
        """Return the table as a section of a page."""
        return render("protocol.html", table=self)

    def write(self, out: Path) -> list[Path]:
        """Write `<out>-<name>.png`, `.svg`, `.md`, `.tex` and `.csv`, and return the paths."""
        out = out.with_name(f"{out.name}-{self.name}")
        out.parent.mkdir(parents=True, exist_ok=True)
        pictures = save(draw(self.plots, self.title, columns=3, shared=True), out)
        table, latex, numbers = (out.with_name(f"{out.name}.{kind}") for kind in SUFFIXES[2:])
        align = "".join("l" if isinstance(cell, str) else "r" for cell in self.lines.iloc[0])
        parts = [f"# {self.title}", *self.words, markdown_table(self.heads, self.cells, align)]
        table.write_text(plain_page("\n\n".join(parts)), encoding="utf-8")
        tex = render("booktabs.tex", align=align, heads=self.heads, lines=self.cells)
        latex.write_text(tex, encoding="utf-8")
        records = map(_numbers, self.lines.to_dict("records"))
        pd.DataFrame(records).to_csv(numbers, index=False, encoding="utf-8")
        return [*pictures, table, latex, numbers]

    def _printed(self, cell: Cell) -> str:
        if isinstance(cell, Interval):
            return cell.percent if self.percent else cell.decimals
        if isinstance(cell, float):
            return f"{100 * cell:.1f}" if self.percent else f"{cell:.2f}"
        return "-" if cell is None else str(cell)


def _numbers(line: Line) -> dict[str, str | float | None]:
    """Return a line for a program: an interval has three columns."""
    numbers: dict[str, str | float | None] = {}
    for name, cell in line.items():
        numbers |= cell.named(name) if isinstance(cell, Interval) else {name: cell}
    return numbers
