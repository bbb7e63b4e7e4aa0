"""What protocols share: the runs of a benchmark that they compare, and the table and figure that they write."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from espalier.harness.errors import UserError, plain_page
from espalier.harness.reports.curves.comparison import ComparedRuns, runs_of
from espalier.harness.reports.curves.curve_files import SUFFIXES
from espalier.harness.reports.curves.curve_points import CONTROLS, FULL, Scores
from espalier.harness.reports.curves.curve_table import markdown_table
from espalier.harness.reports.curves.figures import Plot, draw, save
from espalier.harness.reports.curves.printed_names import escape_latex
from espalier.harness.reports.curves.stored_rows import RunScores, StoredResult, with_settings
from espalier.harness.reports.tables.table_formats import plain_table
from espalier.harness.specs.commands import RUN
from espalier.harness.stats import Interval
from espalier.harness.store.row_text import amount_text

#: A method at one amount: the name of its curve, the share removed, and the tokens kept where these were set.
MethodPoint = tuple[str, float, int | None]


@dataclass(frozen=True)
class BenchmarkRuns:
    """The comparable runs of one model on one benchmark under one budget rule."""

    model: str
    rule: str
    benchmark: str
    compared: ComparedRuns

    @property
    def metric(self) -> str:
        """The headline metric."""
        return self.compared.runs[0].metric

    @property
    def unpruned(self) -> Scores | None:
        """The unpruned model's score of each sample, None if it did not run."""
        return next((self.scores([run]) for run in self.compared.runs if run.method == FULL), None)

    @cached_property
    def points(self) -> dict[MethodPoint, list[RunScores]]:
        """The runs of each method at each amount, one for each seed."""
        points: dict[MethodPoint, list[RunScores]] = {}
        for run in self.compared.runs:
            # At ratio 0 nothing is removed.
            if run.method != FULL and run.ratio > 0:
                points.setdefault((run.name, run.ratio, run.keep), []).append(run)
        return points

    def scores(self, runs: Sequence[RunScores]) -> Scores:
        """Return the score of each sample, seeds averaged."""
        keys = self.compared.keys
        averaged: Scores = np.mean([[run.scores[key] for key in keys] for run in runs], axis=0)
        return averaged

    def result(self, run: RunScores) -> StoredResult:
        """Return the stored result of a run."""
        # By identity: the runs of two seeds are equal where nothing is drawn.
        places = zip(self.compared.runs, self.compared.results, strict=True)
        return next(result for compared_run, result in places if compared_run is run)


def grouped_runs(results: Sequence[StoredResult]) -> list[BenchmarkRuns]:
    """Return the runs of a selection, ordered by model, rule and benchmark.

    Raises:
        UserError: the runs of a benchmark differ in a setting that must be the same, or lack scores of samples.
    """
    groups: dict[tuple[str, str, str], list[StoredResult]] = {}
    for result in with_settings(results)[0]:
        row = result.row
        key = (row["model"], row["budget_rule"], row["benchmark"])
        groups.setdefault(key, []).append(result)
    return [
        BenchmarkRuns(*key, runs_of(key[2], group, swept=True))
        for key, group in sorted(groups.items())
    ]


def kept_text(point: MethodPoint) -> str:
    """Return what a method keeps at a point: a share in percent, or a number of tokens."""
    _, ratio, count = point
    return f"{100 * (1 - ratio):.4g} %" if count is None else amount_text(ratio, count)


def is_control(runs: Sequence[RunScores]) -> bool:
    """Return whether no paper proposes the method of these runs."""
    return runs[0].method in CONTROLS


def nothing_to_show(protocol: str, lacks: str, command: str) -> UserError:
    """Return the error of a protocol that a selection has no runs for."""
    return UserError(
        f"--protocol={protocol} needs {lacks} among the selected results; valid: a store of `{RUN} {command}`"
    )


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
