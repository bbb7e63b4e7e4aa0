"""Published tables: `results/papers/<paper>_table<N>.csv`, a line for each cell, and `<paper>.yaml` for its names.

The tests check columns, names, units and numbers of all files.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.errors import UserError
from espalier.harness.paths import PAPERS
from espalier.harness.settings import choice, defaults, read_section


@dataclass(frozen=True)
class FigurePanel:
    """One panel of a figure.

    Attributes:
        title: in our words.
        where: which points it shows, by keys of a cell.
        x: the key of a cell along the axis: `budget` gives lines, anything else bars.
        y: label of the axis.
        line: the key of a cell that separates lines.
        lines: names of the lines; empty: all.
        reference: the method that the other scores are relative to, in percent; empty: absolute scores.
    """

    title: str
    where: Mapping[str, str] = field(default_factory=dict)
    x: str = "budget"
    y: str = "score"
    line: str = "method"
    lines: tuple[str, ...] = ()
    reference: str = ""


def name_of(slug: str, number: str) -> str:
    """Return the name of a table or figure in files and presets: `d2pruner_table1`, `d2pruner_fig4`."""
    return f"{slug}_{number}" if is_figure(number) else f"{slug}_table{number}"


def display_name(number: str) -> str:
    """Return the paper's name of a table or figure: `Table 1`, `Figure 4`."""
    return f"Figure {number.removeprefix('fig')}" if is_figure(number) else f"Table {number}"


def is_figure(number: str) -> bool:
    """Return whether a number names a figure, such as `fig4`."""
    return number.startswith("fig")


#: Columns that identify a cell.
KEYS = ("paper", "table", "model", "method", "budget", "benchmark", "split", "metric")
COLUMNS = (*KEYS, "value", "unit")

#: All units, with the largest difference between a measured and a printed number that counts as near; None: a time, a
#: rate or a size, which another machine does not reproduce.
UNITS: Mapping[str, float | None] = {
    "%": 0.5,
    "score": 10.0,
    "F1": 0.5,
    "% of vanilla": 0.5,
    "% of baseline": 0.5,
    "CIDEr (x1)": 0.005,
    "CIDEr (x100)": 0.5,
    "score 0-100": 0.5,
    "score 0-3": 0.02,
    "fraction": 0.005,
    "edit distance": 0.005,
    "tokens": 0.5,
    "T": 0.05,
    "TFLOPs": 0.5,
    "GFLOPs": 0.5,
    "x": None,
    "ratio": None,
    "ms": None,
    "ms/sample": None,
    "ms/token": None,
    "s": None,
    "MB": None,
    "GB": None,
    "token/s": None,
}


#: The same for metrics that are judged more closely than their unit.
METRICS: Mapping[str, float] = {
    # The steps of a paper's ablation are 0.2 to 0.5.
    "mean accepted length M": 0.05,
}


@dataclass(frozen=True)
class PrintedCell:
    """A printed cell; `value` is as printed, with trailing zeros, and empty if the paper prints none."""

    paper: str
    table: str
    model: str
    method: str
    budget: str
    benchmark: str
    split: str
    metric: str
    value: str
    unit: str

    @property
    def key(self) -> tuple[str, ...]:
        """The values of `KEYS`, unique for each cell."""
        return tuple(getattr(self, name) for name in KEYS)

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.paper} {self.table}: {', '.join(filter(None, self.key[2:]))}"

    @cached_property
    def number(self) -> float:
        """The printed value as a number; check `value` first."""
        return float(self.value)

    @property
    def allowed(self) -> float | None:
        """The largest difference that counts as near; None: nothing on another machine does."""
        return METRICS.get(self.metric, UNITS[self.unit])

    @property
    def column(self) -> str:
        """The column of a budget: `50%` for `50% visual KV`; of a row printed for each column, that of its split."""
        is_column = self.split.startswith("column ")
        return self.split.removeprefix("column ") if is_column else self.budget.partition(" ")[0]

    @property
    def half(self) -> float:
        """Half a unit of the last printed digit: the rounding error."""
        return 0.5 * 10.0**-self.digits

    @property
    def digits(self) -> int:
        """Printed digits after the decimal point."""
        return len(self.value.partition(".")[2])


def place(cell: PrintedCell) -> str:
    """Return the name of a cell's benchmark in the paper's file: with its split, where the file lists that."""
    return f"{cell.benchmark} {cell.split}".strip()


FOLDER = PAPERS

#: The key of an entry with additions for some cells, by column and by name in that column.
AT = "at"

#: Keys of an entry that are not overrides: where the number is in a row, by what tables multiply it, and why it need
#: not equal the printed one.
NUMBER_KEYS = ("metric", "of", "scale", "unlike")

#: Keys that every run sets, in the order of a command line.
FIRST = ("model", "method", "budget", "ratio", "benchmark")


@dataclass(frozen=True)
class Average:
    """How a table averages.

    Attributes:
        where: keys of a cell with the values that the printed averages share.
        rule: ratios (mean of value over reference, in percent), mean, or omnidocbench.
        reference: the method of the reference rows, for ratios.
        why: known facts of the paper's own rule.
    """

    where: Mapping[str, str]
    rule: str
    reference: str = ""
    why: str = ""

    def prints(self, cell: PrintedCell) -> bool:
        """Return whether a cell is a printed average."""
        return all(getattr(cell, key) == value for key, value in self.where.items())


@dataclass(frozen=True)
class TableEntry:
    """A table's entry in a paper's file.

    Attributes:
        title: its content, in our words.
        cells: number of lines of its file, including empty values.
        rows, columns: keys of a cell that name the lines and head the columns, outermost first.
        rebuilt: how: `measured`, `analytic`, both, or `printed` for neither.
        overrides: what every run of the table adds to its command line.
        average: how it averages; None: it does not.
        decisions: decisions about malformed rows, or, for a figure, about facts that the text leaves open.
        grid: of a figure without printed points: lists of names by key of a cell; the points are their products.
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
    panels: tuple[FigurePanel, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A paper's file.

    Attributes:
        slug: name of its files.
        models, methods, budgets, benchmarks, metrics: by printed name, the part of a run that it means
        (harness/reports/tables/cell_runs.py), or, as a text, why nothing in this project does.
        absent: tables and figures with results that are not in `tables`, and why; a part as `fig8b`.
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
    tables: Mapping[str, TableEntry]
    absent: Mapping[str, str] = field(default_factory=dict)

    def table(self, number: str) -> TableEntry:
        """Return a table's entry.

        Raises:
            UserError: the paper's file has no such table.
        """
        if number in self.absent:
            raise UserError(
                f"{display_name(number)} of {self.paper} is not rebuilt: {self.absent[number]}; valid: "
                + ", ".join(self.tables)
            )
        return self.tables[choice(f"table of {self.slug}", number, self.tables)]


def papers(folder: Path = FOLDER) -> list[str]:
    """Return the names of the papers' files."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


@lru_cache(maxsize=32)
def read_paper(slug: str, folder: Path = FOLDER) -> Paper:
    """Return a paper's file.

    Raises:
        UserError: there is no such paper, or its file lacks a key or has an unknown one.
    """
    choice("paper", slug, papers(folder))
    entries = read_yaml(folder / f"{slug}.yaml")
    tables = {str(number): entry for number, entry in entries.pop("tables", {}).items()}
    absent = {str(number): why for number, why in entries.pop("absent", {}).items()}
    for entry in tables.values():
        entry["panels"] = [{**defaults(FigurePanel), **panel} for panel in entry.get("panels", ())]
        if entry.get("average") is not None:
            entry["average"] = {**defaults(Average), **entry["average"]}
    filled = {number: {**defaults(TableEntry), **entry} for number, entry in tables.items()}
    values = {**entries, "slug": slug, "tables": filled, "absent": absent}
    return read_section(Paper, slug, {**defaults(Paper), **values})


def read_cells(paper: Paper, number: str, folder: Path = FOLDER) -> tuple[PrintedCell, ...]:
    """Return the cells of a table, in printed order; raises UserError if there is no such table."""
    path = folder / f"{name_of(paper.slug, number)}.csv"
    lines = _points(paper, number) if paper.table(number).grid else read_lines(path)
    return tuple(PrintedCell(*line) for line in lines)


def _points(paper: Paper, number: str) -> list[list[str]]:
    """Return the points of a figure, products of lists of names, as lines without a printed value."""
    where = {"paper": paper.paper, "table": number}
    points = [
        {**where, **dict(zip(grid, names, strict=True))}
        for grid in paper.tables[number].grid
        for names in product(*grid.values())
    ]
    return [[point.get(column, "") for column in COLUMNS] for point in points]


def read_lines(path: Path) -> list[list[str]]:
    """Return the lines of a file in results/papers below its heading."""
    with path.open(encoding="utf-8", newline="") as file:
        _, *lines = csv.reader(file)
    return lines
