"""What papers print: `results/papers/<paper>_table<N>.csv`, a line a cell, and `<paper>.yaml`, what its names mean.

A file is read whole or refused, with its name and the line: columns, paper and table, known names, known units, values
that are numbers or empty, no cell twice, and as many lines as the paper's file says.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.errors import UserError, unknown_name
from espalier.harness.paths import ROOT
from espalier.harness.reports.tables.panels import Panel, name_of, points
from espalier.harness.reports.tables.printed_cell import COLUMNS, UNITS, Cell, place

FOLDER = ROOT / "results" / "papers"

#: The key of an entry that adds to it for some cells: by column and by name in that column.
AT = "at"

#: Keys of an entry that are no overrides: where the number stands in a row, by what tables multiply it, and why it is
#: not the printed one's equal.
MEASURE = ("metric", "of", "scale", "unlike")

#: What every wanted run states, in the order of a command line.
FIRST = ("model", "method", "budget", "ratio", "benchmark")

#: Sections of overrides that rows tell of, so that a table can compare them.
SECTIONS = ("model", "method", "benchmark", "engine", "judge")

#: Parts of a paper's file whose entries are looked up by the names of a cell.
PARTS = ("models", "methods", "budgets", "benchmarks", "metrics")


@dataclass(frozen=True)
class Average:
    """How a table averages.

    Attributes:
        where: what the printed averages have in common, by keys of a cell.
        rule: ratios (mean of value over reference, in percent), mean, or omnidocbench.
        reference: the method of the reference rows, for ratios.
        why: what is known of the paper's own rule.
    """

    where: Mapping[str, str]
    rule: str
    reference: str = ""
    why: str = ""

    def prints(self, cell: Cell) -> bool:
        """Say whether a cell is a printed average."""
        return all(getattr(cell, key) == value for key, value in self.where.items())


@dataclass(frozen=True)
class Printed:
    """What a paper's file says of one table.

    Attributes:
        title: what it shows, in our words.
        cells: lines of its file, empty values included.
        rows, columns: keys of a cell whose values lead the lines and head the columns, outermost first.
        rebuilt: how: `measured`, `analytic`, both, or `printed` for what is neither.
        overrides: what every run of the table adds to its command line.
        average: how it averages; None: it does not.
        decisions: what was decided about malformed rows, or, of a figure, about what the text does not say.
        grid: of a figure, whose points are not printed: lists of names by key of a cell, whose products they are.
        panels: of a figure.
    """

    title: str
    cells: int
    rebuilt: tuple[str, ...]
    rows: tuple[str, ...] = ("model", "budget", "method")
    columns: tuple[str, ...] = ("benchmark", "split", "metric")
    overrides: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Any] = field(default_factory=dict)
    average: Average | None = None
    decisions: tuple[str, ...] = ()
    grid: tuple[Mapping[str, Any], ...] = ()
    panels: tuple[Panel, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A paper's file.

    Attributes:
        slug: name of its files.
        models, methods, budgets, benchmarks, metrics: by printed name, what of a run it is
        (harness/reports/tables/cell_runs.py),
            or why nothing of this project is, as a text.
    """

    slug: str
    paper: str
    title: str
    arxiv: str
    venue: str
    transcribed: str
    models: Mapping[str, Any]
    methods: Mapping[str, Any]
    budgets: Mapping[str, Any]
    benchmarks: Mapping[str, Any]
    metrics: Mapping[str, Any]
    tables: Mapping[str, Printed]

    def table(self, number: str) -> Printed:
        """Return a table's entry.

        Raises:
            UserError: the paper has no such table here.
        """
        if number not in self.tables:
            raise unknown_name(f"table of {self.slug}", number, self.tables)
        return self.tables[number]


def papers(folder: Path = FOLDER) -> list[str]:
    """Return the names of the papers' files."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


Made = TypeVar("Made", Average, Panel, Printed, Paper)


@lru_cache(maxsize=32)
def read_paper(slug: str, folder: Path = FOLDER) -> Paper:
    """Return a paper's file.

    Raises:
        UserError: there is no such paper, or its file lacks a key or has an unknown one.
    """
    if slug not in papers(folder):
        raise unknown_name("paper", slug, papers(folder))
    path = folder / f"{slug}.yaml"
    found = read_yaml(path.read_text(encoding="utf-8"), path)
    tables = {str(number): _printed(path, one) for number, one in found.pop("tables", {}).items()}
    paper = _made(Paper, path, {**found, "slug": slug, "tables": tables})
    _check_entries(path, paper)
    return paper


def read_cells(paper: Paper, number: str, folder: Path = FOLDER) -> tuple[Cell, ...]:
    """Return the cells of a table, in printed order.

    Raises:
        UserError: there is no such table, or a line of its file is damaged.
    """
    entry, path = paper.table(number), folder / f"{name_of(paper.slug, number)}.csv"
    if entry.grid:
        return _figure(paper, number, folder / f"{paper.slug}.yaml")
    found: dict[tuple[str, ...], Cell] = {}
    for where, line in read_lines(path, COLUMNS):
        cell = _cell(line, where, paper, number)
        if cell.key in found:
            raise UserError(f"{where}: {cell.name} stands there twice")
        found[cell.key] = cell
    if len(found) != entry.cells:
        raise UserError(
            f"{path}: {len(found)} cells; valid: {entry.cells}, as {paper.slug}.yaml says"
        )
    return tuple(found.values())


def read_lines(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of a file in results/papers, each behind the words that say where it stands.

    Raises:
        UserError: there is no such file, it has other columns, or a line has more or fewer.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; valid: a file with columns {','.join(columns)}")
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        head = next(lines, [])
        if head != list(columns):
            raise UserError(f"{path}, line 1: columns {','.join(head)}; valid: {','.join(columns)}")
        for line in lines:
            where = f"{path}, line {lines.line_num}"
            if len(line) != len(columns):
                raise UserError(f"{where}: {len(line)} columns; valid: {len(columns)}")
            yield where, [text.strip() for text in line]


def _figure(paper: Paper, number: str, path: Path) -> tuple[Cell, ...]:
    """Return the points of a figure as cells without a printed value."""
    entry, where = paper.tables[number], f"{path}, {number}"
    found = []
    for named in points(entry.grid):
        cell = Cell(**{"paper": paper.paper, "table": number, **named})
        _check(cell, paper, where)
        found.append(cell)
    if len(found) != entry.cells:
        raise UserError(f"{where}: {len(found)} points; valid: {entry.cells}, as it says itself")
    return tuple(found)


def _cell(line: Sequence[str], where: str, paper: Paper, table: str) -> Cell:
    cell = Cell(*line)
    if (cell.paper, cell.table) != (paper.paper, table):
        raise UserError(
            f"{where}: table {cell.table!r} of {cell.paper!r}; valid: table {table} of {paper.paper}"
        )
    _check(cell, paper, where)
    return cell


def _check(cell: Cell, paper: Paper, where: str) -> None:
    """Raise UserError unless the paper's file knows a cell's names, and its value is a number or nothing."""
    methods = {**paper.methods, **paper.tables[cell.table].methods}
    known: dict[str, Iterable[str]] = {
        "model": paper.models,
        "method": methods,
        "budget": paper.budgets,
        "metric": paper.metrics,
        "unit": UNITS,
    }
    for name, valid in known.items():
        text = getattr(cell, name)
        if text not in valid:
            raise UserError(f"{where}: {unknown_name(name, text, valid)}")
    if place(cell) not in paper.benchmarks and cell.benchmark not in paper.benchmarks:
        raise UserError(f"{where}: {unknown_name('benchmark', place(cell), paper.benchmarks)}")
    if cell.value and not _is_number(cell.value):
        raise UserError(
            f"{where}: value={cell.value!r} is not a number; valid: a number or nothing"
        )


def _check_entries(path: Path, paper: Paper) -> None:
    """Raise UserError unless entries hold overrides and `MEASURE` alone, and `at` names columns and names of these."""
    methods = {*paper.methods, *(name for one in paper.tables.values() for name in one.methods)}
    columns: dict[str, Collection[str]] = {
        "model": paper.models,
        "method": methods,
        "budget": paper.budgets,
        "benchmark": paper.benchmarks,
        "metric": paper.metrics,
    }
    for key, entry in _entries(paper):
        _check_keys(f"{path}: {key}", entry, (*MEASURE, *FIRST, AT))
        added = {} if isinstance(entry, str) else entry.get(AT, {})
        for column, names in _table(f"{path}: {key}.{AT}", added).items():
            if column not in columns:
                raise UserError(
                    f"{path}: {unknown_name(f'column of {key}.{AT}', str(column), columns)}"
                )
            where = f"{key}.{AT}.{column}"
            for name, more in _table(f"{path}: {where}", names).items():
                if name not in columns[column]:
                    raise UserError(f"{path}: {unknown_name(where, str(name), columns[column])}")
                _check_keys(f"{path}: {where}.{name}", more, (*MEASURE, *FIRST))


def _entries(paper: Paper) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a paper's file that cells are looked up in, each with its key."""
    for part in PARTS:
        for name, entry in getattr(paper, part).items():
            yield f"{part}.{name}", entry
    for number, table in paper.tables.items():
        yield f"tables.{number}.overrides", table.overrides
        for name, entry in table.methods.items():
            yield f"tables.{number}.methods.{name}", entry


def _check_keys(where: str, entry: Any, plain: Sequence[str]) -> None:
    """Raise UserError unless an entry is a reason, or a table of `plain` keys and overrides that tables compare."""
    if isinstance(entry, str):
        return
    for key in _table(where, entry):
        section, dot, _ = str(key).lstrip("+").partition(".")
        if key not in plain and (section not in SECTIONS or not dot):
            raise UserError(
                f"{where}: key={key!r} is unknown; valid: {', '.join(plain)}, or an override of {', '.join(SECTIONS)}"
            )


def _table(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}={value!r} is no table; valid: names and what each of them adds")
    return value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _printed(path: Path, entry: Mapping[str, Any]) -> Printed:
    values = dict(entry)
    if values.get("average") is not None:
        values["average"] = _made(Average, path, values["average"])
    values["panels"] = tuple(_made(Panel, path, one) for one in values.get("panels", ()))
    for name in ("rebuilt", "rows", "columns", "decisions", "grid"):
        if name in values:
            values[name] = tuple(values[name])
    return _made(Printed, path, values)


def _made(kind: type[Made], path: Path, values: Mapping[str, Any]) -> Made:
    known = {one.name for one in fields(kind)}
    for name in values:
        if name not in known:
            raise UserError(f"{path}: {unknown_name('key', str(name), known)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"{path}: {error}; valid: the keys of {kind.__name__}") from error
