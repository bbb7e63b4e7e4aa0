"""Cells of published tables, read from results/papers/*.csv."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from harness.errors import UserError

#: What tells the cells of a table apart.
KEYS = ("paper", "table", "model", "method", "budget", "benchmark", "split", "metric")


@dataclass(frozen=True)
class Cell:
    """One printed cell: a line of results/papers/*.csv, as it is printed, with its sign and its zeros."""

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
        """What no other cell has."""
        return tuple(getattr(self, name) for name in KEYS)

    @property
    def name(self) -> str:
        """The cell in words."""
        _, _, *parts = self.key
        return f"{self.paper} {self.table}: {', '.join(part for part in parts if part)}"

    @cached_property
    def number(self) -> float:
        """The printed value.

        Raises:
            UserError: it is no number.
        """
        try:
            return float(self.value)
        except ValueError:
            raise UserError(f"{self.name}: {self.value!r} is not a number") from None

    @property
    def kept(self) -> float:
        """The share that a budget such as `33.4% visual tokens` keeps.

        Raises:
            UserError: the budget is no such share.
        """
        share, percent, _ = self.budget.partition("%")
        try:
            return float(share) / 100 if percent else float("")
        except ValueError:
            raise UserError(f"{self.name}: budget={self.budget!r} starts with no share") from None

    def fits(self, pattern: re.Pattern[str], key: str) -> re.Match[str]:
        """Return how a pattern fits a whole key, such as `split`.

        Raises:
            UserError: it does not.
        """
        found = pattern.fullmatch(getattr(self, key))
        if found is None:
            raise UserError(f"{self.name}: {key}={getattr(self, key)!r} is not {pattern.pattern!r}")
        return found

    @property
    def half(self) -> float:
        """Half a unit of the last printed digit: what rounding takes or gives."""
        return 0.5 * 10.0 ** -len(self.value.partition(".")[2])


@dataclass(frozen=True)
class Sheet:
    """One printed table.

    Attributes:
        path: its file.
        cells: in printed order.
    """

    path: Path
    cells: tuple[Cell, ...]

    @classmethod
    def read(cls, folder: Path, paper: str, table: int) -> Sheet:
        """Read `<folder>/<paper>_table<table>.csv`.

        Raises:
            UserError: there is no such file, or it has other columns.
        """
        path = folder / f"{paper.lower()}_table{table}.csv"
        return cls(path, tuple(Cell(**line) for line in lines_of(path, (*KEYS, "value", "unit"))))

    def column(self, metric: str, **where: str) -> Iterator[Cell]:
        """Yield the cells of a column that have a value.

        Raises:
            UserError: there are none.
        """
        found = [one for one in self.cells if one.metric == metric and one.value]
        found = [one for one in found if all(getattr(one, k) == v for k, v in where.items())]
        if not found:
            raise UserError(f"{self.path.name} has no cell of metric={metric!r} {where or ''}")
        yield from found

    def beside(self, cell: Cell, **other: str) -> Cell:
        """Return the cell that differs from `cell` in the given keys alone.

        Raises:
            UserError: there is none.
        """
        wanted = replace(cell, **other).key
        for one in self.cells:
            if one.key == wanted:
                return one
        raise UserError(f"{self.path.name} has no cell {', '.join(filter(None, wanted[2:]))!r}")


def lines_of(path: Path, names: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the lines of a table as they are printed.

    Raises:
        UserError: there is no such file, or it has other columns.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
    except FileNotFoundError:
        raise UserError(f"published table {path} is missing") from None
    if tuple(reader.fieldnames or ()) != names:
        raise UserError(f"{path.name} has columns {reader.fieldnames}; wanted {list(names)}")
    for number, line in enumerate(lines, start=2):
        if None in line or None in line.values():
            raise UserError(f"{path.name}, line {number}, has not {len(names)} fields")
    return lines
