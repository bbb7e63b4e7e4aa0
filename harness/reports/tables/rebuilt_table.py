"""One published table rebuilt: its cells in the paper's own layout, averages, and what fills the missing ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.reports.tables.cell_runs import Wanted, text, wanted
from espalier.harness.reports.tables.cell_verdicts import Filled, Formula, Shelf, error_of, fill
from espalier.harness.reports.tables.panels import name_of
from espalier.harness.reports.tables.published_tables import (
    FOLDER,
    Paper,
    Printed,
    read_cells,
    read_paper,
)
from espalier.harness.reports.tables.table_averages import Averaged, averages, with_averages
from espalier.harness.reports.tables.table_rows import Asked, Notes


@dataclass(frozen=True)
class Line:
    """A line of a table: the headings above it, outermost first, its label, and its cells by column."""

    headings: tuple[str, ...]
    label: str
    cells: Mapping[tuple[str, ...], Filled]


@dataclass(frozen=True)
class Table:
    """A rebuilt table.

    Attributes:
        columns: what heads each column, outermost first; keys of the lines' cells.
        model: what ran in place of the printed models, if anything did.
        averaged: of every line with an average.
        notes: what is said of rows.
    """

    paper: Paper
    number: str
    columns: tuple[tuple[str, ...], ...]
    lines: tuple[Line, ...]
    filled: tuple[Filled, ...]
    averaged: tuple[Averaged, ...]
    model: str | None
    notes: tuple[str, ...]

    @property
    def entry(self) -> Printed:
        """What the paper's file says of the table."""
        return self.paper.tables[self.number]

    @property
    def name(self) -> str:
        """The table's name, as files and presets have it."""
        return name_of(self.paper.slug, self.number)

    @property
    def counts(self) -> Counter[str]:
        """How many cells have which verdict."""
        return Counter(one.verdict for one in self.filled)

    def commands(self) -> list[str]:
        """Return commands that fill the missing cells, one for all benchmarks of a line."""
        missing: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for one in self.filled:
            if isinstance(one.run, Wanted) and one.value is None:
                others = tuple(
                    f"{key}={_quoted(value)}"
                    for key, value in one.run.overrides.items()
                    if key != "benchmark"
                )
                missing[others].append(str(one.run.overrides["benchmark"]))
        return [
            command(others, list(dict.fromkeys(benchmarks)))
            for others, benchmarks in missing.items()
        ]

    def uncompared(self) -> dict[str, int]:
        """Return how many printed cells are not compared with what is measured of them, by the reason."""
        return dict(Counter(one.unlike for one in self.filled if one.cell.value and one.unlike))

    def unreachable(self) -> dict[str, int]:
        """Return how many printed cells neither a run nor a formula fills, by the reason."""
        reasons = Counter(
            one.run
            for one in self.filled
            if isinstance(one.run, str) and one.cell.value and one.analytic is None
        )
        return {str(reason): count for reason, count in reasons.items()}


def command(others: Sequence[str], benchmarks: Sequence[str]) -> str:
    """Return the command line that runs a method on benchmarks."""
    sweep = "-m " if len(benchmarks) > 1 else ""
    return f"python run.py {sweep}{' '.join(others)} benchmark={','.join(benchmarks)}"


def asked_numbers(slugs: Sequence[tuple[str, str]], model: str | None) -> Asked:
    """Return the numbers that some tables ask of rows, with their errors, by model and benchmark."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for slug, number in slugs:
        paper = read_paper(slug)
        for cell in read_cells(paper, number):
            run = wanted(paper, cell, model)
            if isinstance(run, Wanted):
                where = str(run.overrides["model"]), str(run.overrides["benchmark"])
                found[where] |= {run.of, error_of(run.of)}
    return {where: frozenset(paths) for where, paths in found.items()}


def build(
    slug: str,
    number: str,
    shelf: Shelf,
    model: str | None = None,
    analytic: Mapping[tuple[str, ...], Formula] | None = None,
    folder: Path = FOLDER,
) -> Table:
    """Return a table with what rows say of it.

    Args:
        slug: the paper's.
        number: the table's.
        shelf: rows that may stand in one table (rows.choose).
        model: what runs in place of the printed models.
        analytic: what formulas say, by the key of a cell.
        folder: where the papers' files lie.

    Raises:
        UserError: there is no such table, or its file is damaged.
    """
    paper, notes = read_paper(slug, folder), Notes()
    cells = read_cells(paper, number, folder)
    entry = paper.tables[number]
    filled = fill(paper, cells, shelf, notes, model, analytic)
    averaged = averages(filled, entry.average)
    filled = with_averages(filled, averaged)
    columns = _telling(filled, entry.columns)
    leading = _telling(filled, entry.rows)
    # A line is named by the innermost key, even where those before it would tell it.
    if len({_values(one, entry.rows[-1:]) for one in filled}) > 1 and entry.rows[-1] not in leading:
        leading = (*leading, entry.rows[-1])
    lines: dict[tuple[str, ...], dict[tuple[str, ...], Filled]] = defaultdict(dict)
    for one in filled:
        lines[_values(one, leading)][_values(one, columns)] = one
    heads = dict.fromkeys(_values(one, columns) for one in filled)
    return Table(
        paper,
        number,
        tuple(heads),
        tuple(Line(key[:-1], key[-1], found) for key, found in lines.items()),
        tuple(filled),
        tuple(averaged),
        model,
        tuple(notes.lines()),
    )


def _values(one: Filled, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(getattr(one.cell, key)) for key in keys)


def _telling(filled: Sequence[Filled], keys: Sequence[str]) -> tuple[str, ...]:
    """Return those of the keys that tell cells apart, given those before them; the last one if none does."""
    told: tuple[str, ...] = ()
    for key in keys:
        before = {_values(one, told) for one in filled}
        after = {_values(one, (*told, key)) for one in filled}
        if len(after) > len(before):
            told = (*told, key)
    return told or (keys[-1],)


def _quoted(value: object) -> str:
    said = text(value)
    return f"'{said}'" if "$" in said else said
