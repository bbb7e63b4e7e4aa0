"""A rebuilt published table: its cells in the paper's layout, averages, and the commands for missing cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Literal

import pandas as pd

from espalier.harness.reports.tables.cell_runs import CellRun, run_of_cell, text
from espalier.harness.reports.tables.cell_verdicts import (
    FilledCell,
    FormulaValue,
    ResultIndex,
    error_of,
    fill,
)
from espalier.harness.reports.tables.published_tables import (
    FOLDER,
    Average,
    Paper,
    PrintedCell,
    TableEntry,
    display_name,
    name_of,
    read_cells,
    read_paper,
)
from espalier.harness.reports.tables.table_rows import Notes, RequestedNumbers
from espalier.harness.specs.commands import RUN
from espalier.harness.specs.comparable import grouped

#: A line's cells by benchmark, split and metric.
CellsByKey = dict[tuple[str, ...], FilledCell]


@dataclass(frozen=True)
class LineAverage:
    """The averages of a line.

    Attributes:
        cell: the printed average.
        follows: the paper's rule on the printed cells of the line; None if these are incomplete.
        slack: largest effect of rounding of the printed numbers.
        consistent: the same over the benchmarks that all lines of the model have.
        measured: the paper's rule on measured numbers; None unless all of them are measured.
        shared: number of benchmarks that all lines have.
        mismatch: why the measured average need not equal the printed one: the reasons of its cells.
        unread: whether too many answers of a measured number could not be parsed.
    """

    cell: PrintedCell
    follows: float | None
    slack: float
    consistent: float | None
    measured: float | None
    shared: int
    mismatch: str = ""
    unread: bool = False

    @property
    def remark(self) -> str:
        """What is inconsistent in print, or empty."""
        if self.follows is None or not self.cell.value:
            return ""
        if abs(self.cell.number - self.follows) <= self.slack + 1e-9:
            return ""
        return f"printed {self.cell.value}, the printed cells give {self.follows:.{max(self.cell.digits, 2)}f}"

    def into(self, filled: FilledCell) -> FilledCell:
        """Return the cell of the printed average, with the measured value and the remark."""
        return replace(
            filled,
            value=self.measured,
            unread=self.measured is not None and self.unread,
            remark=self.remark,
            average_mismatch=self.mismatch,
        )


def averages(filled: Sequence[FilledCell], rule: Average | None) -> list[LineAverage]:
    """Return the averages of every line of a table that prints one."""
    if rule is None:
        return []
    cells = (filled_cell.cell for filled_cell in filled)
    printed = grouped(((cell.model, cell.metric), cell) for cell in cells if rule.prints(cell))
    return [average for group in printed.values() for average in _of_group(group, filled, rule)]


#: Parts of OmniDocBench's Overall: factor and offset of each.
OMNIDOCBENCH = {"text_edit": (-100.0, 100.0), "formula_cdm": (1.0, 0.0), "table_teds": (1.0, 0.0)}

#: Metrics that are not benchmark scores but are printed among them.
RELATIVE = ("relative performance", "TFLOPs", "TFLOPs relative", "time", "time relative")


def _of_group(
    printed: Sequence[PrintedCell], filled: Sequence[FilledCell], rule: Average
) -> list[LineAverage]:
    """Return the averages of one model and one metric."""
    metrics = {"mean": {printed[0].metric}, "omnidocbench": {*OMNIDOCBENCH}}.get(rule.rule)
    lines: dict[tuple[str, str], CellsByKey] = defaultdict(dict)
    reference: CellsByKey = {}
    for filled_cell in filled:
        cell = filled_cell.cell
        if cell.model != printed[0].model or rule.prints(cell) or cell.metric in RELATIVE:
            continue
        if metrics is None or cell.metric in metrics:
            key = (cell.benchmark, cell.split, cell.metric)
            lines[cell.method, cell.budget][key] = filled_cell
            if cell.method == rule.reference:
                reference.setdefault(key, filled_cell)
    with_numbers = [
        {key: part for key, part in lines[cell.method, cell.budget].items() if part.cell.value}
        for cell in printed
    ]
    shared = sorted(set.intersection(*map(set, with_numbers)))
    return [
        _average(cell, line, reference, shared, rule)
        for cell, line in zip(printed, with_numbers, strict=True)
    ]


def _average(
    cell: PrintedCell,
    line: CellsByKey,
    reference: CellsByKey,
    shared: Sequence[tuple[str, ...]],
    rule: Average,
) -> LineAverage:
    """Return the averages of a line, of its cells with a printed number and of those in `shared`."""

    def mean(keys: Iterable[tuple[str, ...]], number: Literal["printed", "value"]) -> float | None:
        parts = [_part(line[key], reference.get(key), rule, number) for key in keys]
        numbers = [part for part in parts if part is not None]
        return fmean(numbers) if numbers and len(numbers) == len(parts) else None

    reasons: dict[str, str] = {}
    for key, filled_cell in line.items():
        for part in (filled_cell, reference.get(key)):
            if part is not None and part.mismatch:
                reasons.setdefault(part.mismatch, f"with {part.cell.benchmark}: {part.mismatch}")
    rounding = [_rounding(part, reference.get(key), rule) for key, part in line.items()]
    return LineAverage(
        cell,
        mean(line, "printed"),
        cell.half + sum(rounding) / max(len(line), 1),
        mean(shared, "printed"),
        mean(line, "value"),
        len(shared),
        "; ".join(reasons.values()),
        any(filled_cell.unread for filled_cell in line.values()),
    )


def _part(
    filled_cell: FilledCell,
    reference: FilledCell | None,
    rule: Average,
    number: Literal["printed", "value"],
) -> float | None:
    """Return what the printed or the measured number of a cell contributes to an average."""
    value = getattr(filled_cell, number)
    if value is None:
        return None
    if rule.rule == "ratios":
        base = None if reference is None else getattr(reference, number)
        return 100 * value / base if base else None
    factor, offset = (
        OMNIDOCBENCH[filled_cell.cell.metric] if rule.rule == "omnidocbench" else (1, 0)
    )
    return float(factor * value + offset)


def _rounding(filled_cell: FilledCell, reference: FilledCell | None, rule: Average) -> float:
    """Return the largest effect of rounding on a printed cell's contribution."""
    cell = filled_cell.cell
    if rule.rule == "omnidocbench":
        return cell.half * abs(OMNIDOCBENCH[cell.metric][0])
    if rule.rule == "mean":
        return cell.half
    if reference is None or not reference.printed:
        return 0.0
    base = reference.printed
    return 100 * (cell.half + cell.number / base * reference.cell.half) / base


@dataclass(frozen=True)
class TableLine:
    """A line of a table: its headings, outermost first, its label, and its cells in the order of the columns."""

    headings: tuple[str, ...]
    label: str
    cells: tuple[FilledCell | None, ...]


@dataclass(frozen=True)
class RebuiltTable:
    """A rebuilt table.

    Attributes:
        columns: headings of each column, outermost first.
        model: the model that ran in place of the printed models, if any.
        averaged: averages of every line that prints one.
        notes: notes on results.
    """

    paper: Paper
    number: str
    columns: tuple[tuple[str, ...], ...]
    lines: tuple[TableLine, ...]
    filled: tuple[FilledCell, ...]
    averaged: tuple[LineAverage, ...]
    model: str | None
    notes: tuple[str, ...]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A line for each cell (`FilledCell.columns`), None where it has nothing."""
        return pd.DataFrame([filled_cell.columns() for filled_cell in self.filled], dtype=object)

    @property
    def entry(self) -> TableEntry:
        """The table's entry in the paper's file."""
        return self.paper.tables[self.number]

    @property
    def name(self) -> str:
        """The table's name in files and presets."""
        return name_of(self.paper.slug, self.number)

    @property
    def title(self) -> str:
        """The paper, the table's number, and its subject."""
        return f"{self.paper.paper}, {display_name(self.number)}: {self.entry.title}"

    @property
    def source(self) -> str:
        """Where the printed numbers are from, and what measured ones stand for."""
        paper = f"{self.paper.title} ({self.paper.venue}, arXiv {self.paper.arxiv})."
        if self.model is None:
            return paper
        return (
            f"{paper} Measured on {self.model} and its benchmarks, which stand for the printed ones: its numbers are "
            "not to be compared with theirs."
        )

    @property
    def heads(self) -> list[str]:
        """A heading for each column."""
        return [" ".join(filter(None, column)) or "value" for column in self.columns]

    @property
    def preset(self) -> str:
        """The command that runs every cell."""
        return f"{RUN} -m +experiment={self.name}{f' model={self.model}' if self.model else ''}"

    def commands(self) -> list[str]:
        """Return the commands that fill the missing cells, one for all benchmarks of a line."""
        missing: dict[str, dict[str, None]] = defaultdict(dict)
        for filled_cell in self.filled:
            if isinstance(filled_cell.run, CellRun) and filled_cell.value is None:
                overrides = dict(filled_cell.run.overrides)
                benchmark = str(overrides.pop("benchmark"))
                words = ((key, text(value)) for key, value in overrides.items())
                line = " ".join(f"{key}='{v}'" if "$" in v else f"{key}={v}" for key, v in words)
                missing[line][benchmark] = None
        return [
            f"{RUN} {'-m ' * (len(names) > 1)}{line} benchmark={','.join(names)}"
            for line, names in missing.items()
        ]


def requested_numbers(slugs: Sequence[tuple[str, str]], model: str | None) -> RequestedNumbers:
    """Return the numbers that tables need, with their errors, by model and benchmark."""
    paths_by_pair: dict[tuple[str, str], set[str]] = defaultdict(set)
    for slug, number in slugs:
        paper = read_paper(slug)
        for cell in read_cells(paper, number):
            run = run_of_cell(paper, cell, model)
            if isinstance(run, CellRun):
                pair = str(run.overrides["model"]), str(run.overrides["benchmark"])
                paths_by_pair[pair] |= {run.number_path, error_of(run.number_path)}
    return {pair: frozenset(paths) for pair, paths in paths_by_pair.items()}


def build(
    slug: str,
    number: str,
    index: ResultIndex,
    model: str | None = None,
    analytic: Mapping[tuple[str, ...], FormulaValue] | None = None,
    folder: Path = FOLDER,
) -> RebuiltTable:
    """Return a table filled with results.

    Args:
        slug: the paper's.
        number: the table's.
        index: results that can be in one table (`table_rows.choose`).
        model: the model that runs in place of the printed models.
        analytic: values of formulas, by the key of a cell.
        folder: where the papers' files are.

    Raises:
        UserError: there is no such table, or its file is damaged.
    """
    paper, notes = read_paper(slug, folder), Notes()
    filled = fill(paper, read_cells(paper, number, folder), index, notes, model, analytic)
    entry = paper.tables[number]
    averaged = averages(filled, entry.average)
    by_key = {average.cell.key: average for average in averaged}
    filled = [
        by_key[cell.cell.key].into(cell) if cell.cell.key in by_key else cell for cell in filled
    ]
    columns, leading = _distinguishing(filled, entry.columns), _distinguishing(filled, entry.rows)
    # Lines are labelled by the innermost key, even if the keys before it already distinguish them.
    innermost = entry.rows[-1]
    if innermost not in leading and len({_values(cell, [innermost]) for cell in filled}) > 1:
        leading = (*leading, innermost)
    lines: dict[tuple[str, ...], dict[tuple[str, ...], FilledCell]] = defaultdict(dict)
    for filled_cell in filled:
        lines[_values(filled_cell, leading)][_values(filled_cell, columns)] = filled_cell
    heads = tuple(dict.fromkeys(_values(filled_cell, columns) for filled_cell in filled))
    return RebuiltTable(
        paper,
        number,
        heads,
        tuple(
            TableLine(key[:-1], key[-1], tuple(lines[key].get(column) for column in heads))
            for key in _grouped([*lines])
        ),
        tuple(filled),
        tuple(averaged),
        model,
        tuple(notes.lines()),
    )


def _grouped(keys: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the keys of lines with equal headings together, in the order of their first lines.

    Files have the lines of two models that are printed side by side one by one.
    """
    first: dict[tuple[str, ...], int] = {}
    for place, key in enumerate(keys):
        for length in range(1, len(key) + 1):
            first.setdefault(key[:length], place)
    return sorted(keys, key=lambda key: [first[key[:end]] for end in range(1, len(key) + 1)])


def _values(filled_cell: FilledCell, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(getattr(filled_cell.cell, key) for key in keys)


def _distinguishing(filled: Sequence[FilledCell], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that distinguish cells, given the keys before them; the last one if none does."""
    chosen: tuple[str, ...] = ()
    for key in keys:
        before, after = (
            {_values(filled_cell, names) for filled_cell in filled}
            for names in (chosen, (*chosen, key))
        )
        if len(after) > len(before):
            chosen = (*chosen, key)
    return chosen or (keys[-1],)
