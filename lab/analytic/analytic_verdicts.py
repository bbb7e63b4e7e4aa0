"""Formulas' claims about published cells, and the verdict on each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from espalier.harness.reports.tables.published_tables import PrintedCell, read_lines
from lab.analytic.analytic_sheet import PrintedSheet

#: Relative error allowed for floating-point arithmetic.
SLACK = 1e-9

#: Default reason for a tolerance.
ROUNDING = "rounding of the printed cell"

#: Of a claim that agrees with print its basis, a formula with values that the paper states or with values fitted to
#: printed cells; of another, whether the print is known to be wrong.
ClaimVerdict = Literal["derived", "fitted", "misprint", "off"]

#: Verdicts on cells that a formula reproduces.
BASES: tuple[ClaimVerdict, ...] = ("derived", "fitted")


@dataclass(frozen=True)
class FormulaClaim:
    """What a formula claims about a cell.

    Attributes:
        cell: the printed cell.
        value: the formula's.
        tolerance: allowed difference in the cell's unit.
        column: the column of the summary; a cell can be in several.
        source: the formula, by its equation.
        why: reason for the tolerance.
        exact: the exact count of the same setting in the same unit, if there is one.
        fitted: the quantity fitted to the printed cells, a constant or the tolerance; empty if nothing was.
    """

    cell: PrintedCell
    value: float
    tolerance: float
    column: str
    source: str
    why: str = ROUNDING
    exact: float | None = None
    fitted: str = ""

    @property
    def basis(self) -> Literal["derived", "fitted"]:
        """Whether the formula is independent of the printed cells, or was fitted to them."""
        return "fitted" if self.fitted else "derived"

    @property
    def residual(self) -> float:
        """Formula minus print."""
        return self.value - self.cell.number

    def agrees(self, printed: float) -> bool:
        """Return whether a printed number equals the formula's within the tolerance."""
        return abs(self.value - printed) <= self.tolerance + SLACK * abs(self.value)


@dataclass(frozen=True)
class Misprint:
    """A cell that is known to be wrong in print: a line of results/papers/misprints.csv."""

    key: tuple[str, ...]
    printed: str
    consistent: float
    why: str


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict; `note` states the fault, or why the print is known to be wrong."""

    claim: FormulaClaim
    verdict: ClaimVerdict
    note: str = ""


def column(
    sheet: PrintedSheet,
    metric: str,
    model: Callable[[PrintedCell], float],
    source: str,
    tolerance: float | None = None,
    why: str = ROUNDING,
    exact: Callable[[PrintedCell], float] | None = None,
    fitted: str = "",
) -> Iterator[FormulaClaim]:
    """Yield a claim by `model` for each cell of a column; without a tolerance, rounding is allowed."""
    for cell in sheet.column(metric):
        allowed = cell.half if tolerance is None else tolerance
        exact_count = None if exact is None else exact(cell)
        yield FormulaClaim(cell, model(cell), allowed, metric, source, why, exact_count, fitted)


def quotient(
    cell: PrintedCell, over: PrintedCell, under: PrintedCell, column: str | None = None
) -> FormulaClaim:
    """Return the claim that a cell is the quotient of two printed (rounded) cells."""
    value = over.number / under.number
    relative_error = over.half / abs(over.number) + under.half / abs(under.number)
    return FormulaClaim(
        cell,
        value,
        cell.half + value * relative_error,
        column or cell.metric,
        f"{over.metric} over {under.metric}",
        why="rounding of all three cells",
    )


def misprints(path: Path) -> tuple[Misprint, ...]:
    """Read the list of cells that are known to be wrong: key, printed and consistent value, reason and source."""
    return tuple(
        Misprint(tuple(key), printed, float(consistent), why)
        for *key, printed, consistent, why, _ in read_lines(path)
    )


def judge(claims: Iterable[FormulaClaim], listed: Iterable[Misprint]) -> list[JudgedClaim]:
    """Return the verdict on each claim.

    A known misprint must be printed as listed, and its consistent value must equal the formula's.
    """
    by_key: Mapping[tuple[str, ...], Misprint] = {misprint.key: misprint for misprint in listed}
    return [_judged(claim, by_key.get(claim.cell.key)) for claim in _with_fitted_cells(claims)]


def _with_fitted_cells(claims: Iterable[FormulaClaim]) -> list[FormulaClaim]:
    """Return the claims; those of a fit add the number of cells of the table that it was made on."""
    fitting = list(claims)
    cells: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for claim in fitting:
        cells[(*claim.cell.key[:2], claim.fitted)].add(claim.cell.key)
    counts = {key: len(keys) for key, keys in cells.items()}
    return [
        replace(
            claim,
            fitted=f"{claim.fitted}, on {_cell_count(counts[(*claim.cell.key[:2], claim.fitted)])}",
        )
        if claim.fitted
        else claim
        for claim in fitting
    ]


def _cell_count(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def unused_misprints(judged: Iterable[JudgedClaim], listed: Iterable[Misprint]) -> list[Misprint]:
    """Return the listed misprints that no claim confirms."""
    confirmed = {item.claim.cell.key for item in judged if item.verdict == "misprint"}
    return [misprint for misprint in listed if misprint.key not in confirmed]


def _judged(claim: FormulaClaim, listed: Misprint | None) -> JudgedClaim:
    if claim.agrees(claim.cell.number):
        return JudgedClaim(claim, claim.basis)
    off = f"off by {abs(claim.residual):.4g}, allowed {claim.tolerance:.4g} ({claim.why})"
    if listed is None:
        return JudgedClaim(claim, "off", off)
    if claim.cell.value != listed.printed:
        return JudgedClaim(claim, "off", f"{off}; as a misprint it is listed with {listed.printed}")
    if not claim.agrees(listed.consistent):
        return JudgedClaim(claim, "off", f"{off}; misprints.csv has {listed.consistent:g} instead")
    return JudgedClaim(claim, "misprint", listed.why)
