"""What formulas say of published cells, and the verdict on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from espalier.harness.errors import UserError
from espalier.harness.reports.tables.analytic.analytic_sheet import Sheet
from espalier.harness.reports.tables.printed_cell import KEYS, Cell
from espalier.harness.reports.tables.published_tables import read_lines

#: Digits that floating-point arithmetic may lose, as a share of the number.
SLACK = 1e-9

#: Why two numbers may be apart, where nothing else is known.
ROUNDING = "rounding of the printed cell"

Verdict = Literal["reproduced", "misprint", "off"]


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
        fitted: what of it was fitted to the printed cells, a constant or the tolerance; empty where nothing was.
    """

    cell: Cell
    value: float
    tolerance: float
    column: str
    source: str
    why: str = ROUNDING
    exact: float | None = None
    fitted: str = ""

    @property
    def basis(self) -> Literal["derived", "fitted"]:
        """Whether the claim could be wrong of the cell, or was fitted to such cells."""
        return "fitted" if self.fitted else "derived"

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


def column(
    sheet: Sheet,
    metric: str,
    model: Callable[[Cell], float],
    source: str,
    tolerance: float | None = None,
    why: str = ROUNDING,
    exact: Callable[[Cell], float] | None = None,
    fitted: str = "",
) -> Iterator[Claim]:
    """Yield a claim of what `model` says for each cell of a column, within rounding if no tolerance is given."""
    for cell in sheet.column(metric):
        allowed = cell.half if tolerance is None else tolerance
        count = None if exact is None else exact(cell)
        yield Claim(cell, model(cell), allowed, metric, source, why, count, fitted)


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
    found = []
    for where, line in read_lines(path, (*KEYS, "printed", "consistent", "why", "source")):
        *key, printed, consistent, why, _ = line
        try:
            found.append(Misprint(tuple(key), printed, float(consistent), why))
        except ValueError:
            raise UserError(
                f"{where}: consistent={consistent!r} is not a number; valid: a number"
            ) from None
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
