"""Compare printed numbers with formulas: `python -m lab.analytic.formulas [--cells]`.

Published cells are read from results/papers/*.csv, known misprints from misprints.csv in the same folder; no model is
needed. Exit status 0: every cell equals the formula's value within its tolerance, or is a known misprint. 1: some cell
does not; standard error names it. 2: a table is missing or damaged, or no formula can read one of its cells.

`--values` writes formulas.csv into the folder of the papers: the values that rebuilt tables show beside their cells.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from espalier.harness.reports.tables.cell_verdicts import FORMULA_COLUMNS, FormulaValue
from espalier.harness.reports.tables.published_tables import FOLDER
from espalier.harness.specs.commands import PlainParser, command
from lab.analytic import aircache_formulas as analytic_aircache
from lab.analytic import d2pruner_formulas as analytic_d2pruner
from lab.analytic import d3tom_formulas as analytic_d3tom
from lab.analytic import parallelvlm_formulas as analytic_parallelvlm
from lab.analytic import rtprune_formulas as analytic_rtprune
from lab.analytic.analytic_verdicts import (
    BASES,
    FormulaClaim,
    JudgedClaim,
    Misprint,
    judge,
    misprints,
    unused_misprints,
)

#: Functions that yield each paper's claims, given the folder of the papers' files.
PAPERS: tuple[Callable[[Path], Iterator[FormulaClaim]], ...] = (
    analytic_d2pruner.claims,
    analytic_d3tom.claims,
    analytic_rtprune.claims,
    analytic_aircache.claims,
    analytic_parallelvlm.claims,
)


def verdicts(folder: Path = FOLDER) -> tuple[list[JudgedClaim], list[Misprint]]:
    """Return the verdict on every claim, and listed misprints that no claim confirms.

    Raises:
        UserError: a table is missing or damaged, or no formula can read one of its cells.
    """
    listed = misprints(folder / "misprints.csv")
    judged = judge((claim for claims in PAPERS for claim in claims(folder)), listed)
    return judged, unused_misprints(judged, listed)


def formulas(folder: Path = FOLDER) -> dict[tuple[str, ...], FormulaValue]:
    """Return the formulas' values by the key of a cell; of several claims on a cell, the first.

    Raises:
        UserError: as `verdicts`.
    """
    values: dict[tuple[str, ...], FormulaValue] = {}
    for item in verdicts(folder)[0]:
        misprint, claim = "" if item.verdict in BASES else item.note, item.claim
        source = f"{claim.source}, fitted: {claim.fitted}" if claim.fitted else claim.source
        values.setdefault(claim.cell.key, FormulaValue(claim.value, source, misprint, claim.basis))
    return values


def write_values(folder: Path = FOLDER) -> None:
    """Write formulas.csv, a line for each cell that a formula has a value of."""
    with (folder / "formulas.csv").open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(FORMULA_COLUMNS)
        for key, formula in formulas(folder).items():
            lines.writerow(
                (*key, repr(formula.value), formula.source, formula.misprint, formula.basis)
            )


SUMMARY = (
    "table",
    "column",
    "cells",
    "derived",
    "fitted",
    "misprints",
    "off",
    "largest residual",
    "allowed",
    "what was fitted",
)
CELLS = (
    *("cell", "printed", "formula", "residual", "allowed", "exact count"),
    *("verdict", "what was fitted", "source"),
)


def summary(judged: Iterable[JudgedClaim]) -> list[tuple[str, ...]]:
    """Return a line for each column of each table, with the largest residual of the cells that a formula gives."""
    lines: list[tuple[str, ...]] = []
    for (table, column), group in groupby(_sorted(judged), _column):
        members = list(group)
        counts = Counter(item.verdict for item in members)
        reproduced = [item.claim for item in members if item.verdict in BASES]
        largest = max(reproduced, key=lambda claim: abs(claim.residual), default=None)
        lines.append(
            (
                table,
                column,
                str(len(members)),
                *(str(counts[verdict]) for verdict in (*BASES, "misprint", "off")),
                "" if largest is None else f"{largest.residual:+.3g} {largest.cell.unit}",
                "" if largest is None else f"{largest.tolerance:.3g} ({largest.why})",
                "; ".join(dict.fromkeys(claim.fitted for claim in reproduced if claim.fitted)),
            )
        )
    return lines


def cells(judged: Iterable[JudgedClaim]) -> list[tuple[str, ...]]:
    """Return a line for each cell."""
    return [
        (
            item.claim.cell.name,
            f"{item.claim.cell.value} {item.claim.cell.unit}",
            f"{item.claim.value:.6g}",
            f"{item.claim.residual:+.3g}",
            f"{item.claim.tolerance:.3g}",
            "" if item.claim.exact is None else f"{item.claim.exact:.6g}",
            f"{item.verdict}: {item.note}" if item.note else item.verdict,
            item.claim.fitted,
            item.claim.source,
        )
        for item in judged
    ]


def console(judged: Sequence[JudgedClaim], by_cell: bool) -> str:
    """Return the terminal output: a line for each column or each cell, and the total."""
    lines = [CELLS, *cells(judged)] if by_cell else [SUMMARY, *summary(judged)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = "".join(
        "  ".join(f"{part:<{width}}" for part, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )
    return f"{text}{total(judged)}\n"


def total(judged: Sequence[JudgedClaim]) -> str:
    """Return the counts of cells and verdicts, derived and fitted ones apart."""
    counts = Counter(item.verdict for item in judged)
    cell_count = len({item.claim.cell.key for item in judged})
    return (
        f"{len(judged)} verdicts on {cell_count} printed cells: {counts['derived']} derived, {counts['fitted']} fitted "
        f"to printed cells, {counts['misprint']} known misprints, {counts['off']} off; measured: none, these are "
        "formulas alone"
    )


def _column(item: JudgedClaim) -> tuple[str, str]:
    return f"{item.claim.cell.paper} {item.claim.cell.table}", item.claim.column


def _sorted(judged: Iterable[JudgedClaim]) -> list[JudgedClaim]:
    """Group the cells of a column; columns stay in the order of their first cells."""
    claims = list(judged)
    first = {key: place for place, key in reversed(list(enumerate(map(_column, claims))))}
    return sorted(claims, key=lambda item: first[_column(item)])


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdicts; return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = PlainParser(prog="python -m lab.analytic.formulas", description=about)
    parser.add_argument("--cells", action="store_true", help="print a line for each cell")
    parser.add_argument("--values", action="store_true", help="write formulas.csv of the papers")
    parser.add_argument("--published", type=Path, default=FOLDER, help="folder of papers' files")
    options = parser.parse_args(argv)
    judged, unconfirmed = verdicts(options.published)
    if options.values:
        write_values(options.published)
    print(console(judged, options.cells), end="")
    off = [item for item in judged if item.verdict == "off"]
    for item in off:
        cell = item.claim.cell
        print(
            f"off: {cell.name}: printed {cell.value}, {item.claim.source} gives {item.claim.value:.6g}: {item.note}",
            file=sys.stderr,
        )
    for misprint in unconfirmed:
        print(
            f"off: misprints.csv lists {', '.join(filter(None, misprint.key))}: no claim confirms it",
            file=sys.stderr,
        )
    return 1 if off or unconfirmed else 0


if __name__ == "__main__":
    sys.exit(main())
