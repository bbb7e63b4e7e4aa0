"""A rebuilt published table: its cells in the paper's layout, averages, and the commands for missing cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.reports.tables.cell_runs import CellRun, run_of_cell, text
from espalier.harness.reports.tables.cell_verdicts import (
    FilledCell,
    FormulaValue,
    ResultIndex,
    error_of,
    fill,
)
from espalier.harness.reports.tables.panels import name_of
from espalier.harness.reports.tables.published_tables import (
    FOLDER,
    Paper,
    TableEntry,
    read_cells,
    read_paper,
)
from espalier.harness.reports.tables.table_averages import LineAverage, averages, with_averages
from espalier.harness.reports.tables.table_rows import Notes, RequestedNumbers
from espalier.harness.specs.commands import RUN


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
