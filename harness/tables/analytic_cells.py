"""Cells of published tables, what a formula says of them, and the verdict on each."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from harness.errors import UserError

#: What tells the cells of a table apart.
KEYS = ("paper", "table", "model", "method", "budget", "benchmark", "split", "metric")

#: Digits that floating-point arithmetic may lose, as a share of the number.
SLACK = 1e-9

#: Why two numbers may be apart, where nothing else is known.
ROUNDING = "rounding of the printed cell"

Verdict = Literal["reproduced", "misprint", "off"]


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

    @property
    def half(self) -> float:
        """Half a unit of the last printed digit: what rounding takes or gives."""
        return 0.5 * 10.0 ** -len(self.value.partition(".")[2])


@dataclass(frozen=True)
class Claim:
    """What a formula says of one cell.

    Attributes:
        cell: the printed one.
        value: the formula's.
        tolerance: how far apart the two may be, in the cell's unit.
        column: what the cell is summed up under; a cell may stand under several.
        source: the formula, by its equation.
        why: where the tolerance comes from.
        exact: the exact count of the same setting in the same unit, where there is one.
    """

    cell: Cell
    value: float
    tolerance: float
    column: str
    source: str
    why: str = ROUNDING
    exact: float | None = None

    @property
    def residual(self) -> float:
        """Formula less print."""
        return self.value - self.cell.number

    def agrees(self, printed: float) -> bool:
        """Whether a printed number is the formula's within the tolerance."""
        return abs(self.value - printed) <= self.tolerance + SLACK * abs(self.value)


@dataclass(frozen=True)
class Misprint:
    """A cell that is known to be wrong in print: a line of results/papers/misprints.csv."""

    key: tuple[str, ...]
    printed: str
    consistent: float
    why: str


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict; `note` says what is wrong, or why the print is known to be."""

    claim: Claim
    verdict: Verdict
    note: str = ""


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
        return cls(path, tuple(Cell(**line) for line in _lines(path, (*KEYS, "value", "unit"))))

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

    def rows(
        self,
        metric: str,
        model: Callable[[Cell], float],
        source: str,
        tolerance: float | None = None,
        why: str = ROUNDING,
        exact: Callable[[Cell], float] | None = None,
    ) -> Iterator[Claim]:
        """Yield a claim of what `model` says for each cell of a column, within rounding if no tolerance is given."""
        for cell in self.column(metric):
            allowed = cell.half if tolerance is None else tolerance
            count = None if exact is None else exact(cell)
            yield Claim(cell, model(cell), allowed, metric, source, why, count)


def quotient(cell: Cell, over: Cell, under: Cell, column: str | None = None) -> Claim:
    """Return the claim that a cell is one printed cell over another, which have been rounded themselves."""
    value = over.number / under.number
    lost = over.half / abs(over.number) + under.half / abs(under.number)
    return Claim(
        cell,
        value,
        cell.half + value * lost,
        column or cell.metric,
        f"{over.metric} over {under.metric}",
        why="rounding of all three cells",
    )


def misprints(path: Path) -> tuple[Misprint, ...]:
    """Read the list of cells that are known to be wrong.

    Raises:
        UserError: there is no such file, it has other columns, or a consistent value is no number.
    """
    names = (*KEYS, "printed", "consistent", "why", "source")
    found = []
    for line in _lines(path, names):
        try:
            consistent = float(line["consistent"])
        except ValueError:
            raise UserError(
                f"{path.name}: consistent={line['consistent']!r} is not a number"
            ) from None
        key = tuple(line[name] for name in KEYS)
        found.append(Misprint(key, line["printed"], consistent, line["why"]))
    return tuple(found)


def judge(claims: Iterable[Claim], known: Iterable[Misprint]) -> list[Judged]:
    """Return the verdict on each claim.

    A known misprint must be printed as it is listed, and its consistent value must be the formula's.
    """
    listed: Mapping[tuple[str, ...], Misprint] = {one.key: one for one in known}
    return [_judged(claim, listed.get(claim.cell.key)) for claim in claims]


def unused(judged: Iterable[Judged], known: Iterable[Misprint]) -> list[Misprint]:
    """Return the listed misprints that no claim found to be one."""
    met = {one.claim.cell.key for one in judged if one.verdict == "misprint"}
    return [one for one in known if one.key not in met]


def _judged(claim: Claim, listed: Misprint | None) -> Judged:
    if claim.agrees(claim.cell.number):
        return Judged(claim, "reproduced")
    off = f"off by {abs(claim.residual):.4g}, allowed {claim.tolerance:.4g} ({claim.why})"
    if listed is None:
        return Judged(claim, "off", off)
    if claim.cell.value != listed.printed:
        return Judged(claim, "off", f"{off}; as a misprint it is listed with {listed.printed}")
    if not claim.agrees(listed.consistent):
        return Judged(claim, "off", f"{off}; misprints.csv has {listed.consistent:g} instead")
    return Judged(claim, "misprint", listed.why)


def _lines(path: Path, names: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
    except FileNotFoundError:
        raise UserError(f"published table {path} is missing") from None
    if tuple(reader.fieldnames or ()) != names:
        raise UserError(f"{path.name} has columns {reader.fieldnames}; wanted {list(names)}")
    return lines
