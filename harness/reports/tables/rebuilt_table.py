"""A rebuilt published table: its cells in the paper's layout, averages, and the commands for missing cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

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
    name_of,
    read_cells,
    read_paper,
)
from espalier.harness.reports.tables.table_rows import Notes, RequestedNumbers
from espalier.harness.specs.commands import RUN

#: Key of a cell within a line: benchmark, split, metric.
CellKey = tuple[str, ...]

#: A line's cells by key.
CellsByKey = Mapping[CellKey, FilledCell]


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


def averages(filled: Sequence[FilledCell], rule: Average | None) -> list[LineAverage]:
    """Return the averages of every line of a table that prints one."""
    if rule is None:
        return []
    printed: dict[tuple[str, ...], list[FilledCell]] = defaultdict(list)
    for filled_cell in filled:
        if rule.prints(filled_cell.cell):
            printed[filled_cell.cell.model, filled_cell.cell.metric].append(filled_cell)
    return [average for group in printed.values() for average in _of_group(group, filled, rule)]


def with_averages(
    filled: Sequence[FilledCell], line_averages: Iterable[LineAverage]
) -> list[FilledCell]:
    """Return the cells of a table, with measured values and remarks on the printed averages."""
    by_key = {average.cell.key: average for average in line_averages}
    cells = []
    for filled_cell in filled:
        average = by_key.get(filled_cell.cell.key)
        if average is None:
            cells.append(filled_cell)
        else:
            unread = average.measured is not None and average.unread
            measured = replace(filled_cell, value=average.measured, unread=unread)
            cells.append(
                replace(measured, remark=average.remark, average_mismatch=average.mismatch)
            )
    return cells


def _of_group(
    printed: Sequence[FilledCell], filled: Sequence[FilledCell], rule: Average
) -> list[LineAverage]:
    """Return the averages of one model and one metric."""
    first = printed[0].cell
    lines: dict[tuple[str, str], dict[tuple[str, ...], FilledCell]] = defaultdict(dict)
    reference: dict[tuple[str, ...], FilledCell] = {}
    for filled_cell in filled:
        cell = filled_cell.cell
        if cell.model != first.model or rule.prints(cell) or cell.metric in RELATIVE:
            continue
        if rule.rule == "mean" and cell.metric != first.metric:
            continue
        if rule.rule == "omnidocbench" and cell.metric not in OMNIDOCBENCH:
            continue
        key = (cell.benchmark, cell.split, cell.metric)
        lines[cell.method, cell.budget][key] = filled_cell
        if cell.method == rule.reference:
            reference.setdefault(key, filled_cell)
    group_lines = [
        lines[filled_cell.cell.method, filled_cell.cell.budget] for filled_cell in printed
    ]
    shared = set.intersection(
        *({key for key, value in line.items() if value.cell.value} for line in group_lines)
    )
    return [
        _averaged(filled_cell.cell, line, reference, shared, rule)
        for filled_cell, line in zip(printed, group_lines, strict=True)
    ]


#: Parts of OmniDocBench's Overall: factor and offset of each.
OMNIDOCBENCH = {"text_edit": (-100.0, 100.0), "formula_cdm": (1.0, 0.0), "table_teds": (1.0, 0.0)}

#: Metrics that are not benchmark scores but are printed among them.
RELATIVE = ("relative performance", "TFLOPs", "TFLOPs relative", "time", "time relative")


def _averaged(
    cell: PrintedCell, line: CellsByKey, reference: CellsByKey, shared: set[CellKey], rule: Average
) -> LineAverage:
    def mean(keys: Iterable[CellKey], measured: bool) -> float | None:
        values = [_share(line[key], reference.get(key), rule, measured) for key in keys]
        numbers = [value for value in values if value is not None]
        return fmean(numbers) if numbers and len(numbers) == len(values) else None

    printed = [key for key, filled_cell in line.items() if filled_cell.cell.value]
    return LineAverage(
        cell,
        mean(printed, False),
        cell.half + _slack(line, reference, printed, rule),
        mean(sorted(shared), False),
        mean(printed, True),
        len(shared),
        "; ".join(_reasons(line, reference, printed)),
        any(line[key].unread for key in printed),
    )


def _reasons(line: CellsByKey, reference: CellsByKey, keys: Sequence[CellKey]) -> list[str]:
    """Return why the cells of an average, or their references, need not equal the printed ones."""
    reasons: dict[str, str] = {}
    for key in keys:
        for filled_cell in (line[key], reference.get(key)):
            if filled_cell is not None and filled_cell.mismatch:
                reasons.setdefault(
                    filled_cell.mismatch,
                    f"with {filled_cell.cell.benchmark}: {filled_cell.mismatch}",
                )
    return list(reasons.values())


def _share(
    filled_cell: FilledCell, reference: FilledCell | None, rule: Average, measured: bool
) -> float | None:
    """Return a cell's contribution to an average."""
    value = _number(filled_cell, measured)
    if value is None:
        return None
    if rule.rule == "omnidocbench":
        factor, offset = OMNIDOCBENCH[filled_cell.cell.metric]
        return factor * value + offset
    if rule.rule == "mean":
        return value
    base = None if reference is None else _number(reference, measured)
    return 100 * value / base if base else None


def _number(filled_cell: FilledCell, measured: bool) -> float | None:
    """Return the measured or the printed number of a cell; None if there is none."""
    if measured:
        return filled_cell.value
    return filled_cell.cell.number if filled_cell.cell.value else None


def _slack(
    line: CellsByKey, reference: CellsByKey, keys: Sequence[CellKey], rule: Average
) -> float:
    """Return the largest effect of rounding of the printed cells on their average."""
    errors = [0.0]
    for key in keys:
        cell, reference_cell = line[key].cell, reference.get(key)
        if rule.rule == "omnidocbench":
            errors.append(cell.half * abs(OMNIDOCBENCH[cell.metric][0]))
        elif rule.rule == "mean":
            errors.append(cell.half)
        elif reference_cell is not None and (base := _number(reference_cell, False)):
            errors.append(100 * (cell.half + cell.number / base * reference_cell.cell.half) / base)
    return sum(errors) / max(len(keys), 1)


@dataclass(frozen=True)
class TableLine:
    """A line of a table: its headings, outermost first, its label, and its cells by column."""

    headings: tuple[str, ...]
    label: str
    cells: Mapping[tuple[str, ...], FilledCell]


@dataclass(frozen=True)
class RebuiltTable:
    """A rebuilt table.

    Attributes:
        columns: headings of each column, outermost first; keys of the lines' cells.
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

    @property
    def entry(self) -> TableEntry:
        """The table's entry in the paper's file."""
        return self.paper.tables[self.number]

    @property
    def name(self) -> str:
        """The table's name in files and presets."""
        return name_of(self.paper.slug, self.number)

    @property
    def counts(self) -> Counter[str]:
        """Number of cells by verdict."""
        return Counter(filled_cell.verdict for filled_cell in self.filled)

    def commands(self) -> list[str]:
        """Return the commands that fill the missing cells, one for all benchmarks of a line."""
        missing: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for filled_cell in self.filled:
            if isinstance(filled_cell.run, CellRun) and filled_cell.value is None:
                overrides = tuple(
                    f"{key}={_quoted(value)}"
                    for key, value in filled_cell.run.overrides.items()
                    if key != "benchmark"
                )
                missing[overrides].append(str(filled_cell.run.overrides["benchmark"]))
        return [
            command(overrides, list(dict.fromkeys(benchmarks)))
            for overrides, benchmarks in missing.items()
        ]

    def uncompared(self) -> dict[str, int]:
        """Return how many printed cells are not compared with their measured values, by reason."""
        return dict(
            Counter(
                filled_cell.mismatch
                for filled_cell in self.filled
                if filled_cell.cell.value and filled_cell.mismatch
            )
        )

    def unreachable(self) -> dict[str, int]:
        """Return how many printed cells neither a run nor a formula fills, by reason."""
        reasons = Counter(
            filled_cell.run
            for filled_cell in self.filled
            if isinstance(filled_cell.run, str)
            and filled_cell.cell.value
            and filled_cell.analytic is None
        )
        return {str(reason): count for reason, count in reasons.items()}


def command(overrides: Sequence[str], benchmarks: Sequence[str]) -> str:
    """Return the command line that runs a method on benchmarks."""
    sweep = "-m " if len(benchmarks) > 1 else ""
    return f"{RUN} {sweep}{' '.join(overrides)} benchmark={','.join(benchmarks)}"


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
    cells = read_cells(paper, number, folder)
    entry = paper.tables[number]
    filled = fill(paper, cells, index, notes, model, analytic)
    averaged = averages(filled, entry.average)
    filled = with_averages(filled, averaged)
    columns = _distinguishing(filled, entry.columns)
    leading = _distinguishing(filled, entry.rows)
    # Lines are labelled by the innermost key, even if the keys before it already distinguish them.
    if (
        len({_values(filled_cell, entry.rows[-1:]) for filled_cell in filled}) > 1
        and entry.rows[-1] not in leading
    ):
        leading = (*leading, entry.rows[-1])
    lines: dict[tuple[str, ...], dict[tuple[str, ...], FilledCell]] = defaultdict(dict)
    for filled_cell in filled:
        lines[_values(filled_cell, leading)][_values(filled_cell, columns)] = filled_cell
    heads = dict.fromkeys(_values(filled_cell, columns) for filled_cell in filled)
    return RebuiltTable(
        paper,
        number,
        tuple(heads),
        tuple(TableLine(key[:-1], key[-1], lines[key]) for key in _grouped(lines)),
        tuple(filled),
        tuple(averaged),
        model,
        tuple(notes.lines()),
    )


def _grouped(keys: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the keys of lines with equal headings together, in the order of their first lines.

    Files have the lines of two models that are printed side by side one by one.
    """
    first: dict[tuple[str, ...], int] = {}
    ordered = list(keys)
    for place, key in enumerate(ordered):
        for length in range(1, len(key) + 1):
            first.setdefault(key[:length], place)
    return sorted(
        ordered, key=lambda key: [first[key[:length]] for length in range(1, len(key) + 1)]
    )


def _values(filled_cell: FilledCell, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(getattr(filled_cell.cell, key)) for key in keys)


def _distinguishing(filled: Sequence[FilledCell], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that distinguish cells, given the keys before them; the last one if none does."""
    chosen: tuple[str, ...] = ()
    for key in keys:
        before = {_values(filled_cell, chosen) for filled_cell in filled}
        after = {_values(filled_cell, (*chosen, key)) for filled_cell in filled}
        if len(after) > len(before):
            chosen = (*chosen, key)
    return chosen or (keys[-1],)


def _quoted(value: object) -> str:
    quoted_text = text(value)
    return f"'{quoted_text}'" if "$" in quoted_text else quoted_text
