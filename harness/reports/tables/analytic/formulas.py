"""Compare printed numbers with formulas: `python -m espalier tables analytic [--cells] [--write FOLDER]`.

Published cells are read from results/papers/*.csv, known misprints from misprints.csv in the same folder; no model is
needed. Exit status 0: every cell equals the formula's value within its tolerance, or is a known misprint. 1: some cell
does not; standard error names it. 2: a table is missing or damaged, or no formula can read one of its cells.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from espalier.harness.errors import UserError
from espalier.harness.reports.tables.analytic import aircache_formulas as analytic_aircache
from espalier.harness.reports.tables.analytic import d2pruner_formulas as analytic_d2pruner
from espalier.harness.reports.tables.analytic import d3tom_formulas as analytic_d3tom
from espalier.harness.reports.tables.analytic import parallelvlm_formulas as analytic_parallelvlm
from espalier.harness.reports.tables.analytic import rtprune_formulas as analytic_rtprune
from espalier.harness.reports.tables.analytic.analytic_print import (
    cells_table,
    console,
    csv_lines,
    summary_table,
)
from espalier.harness.reports.tables.analytic.analytic_verdicts import (
    FormulaClaim,
    JudgedClaim,
    Misprint,
    judge,
    misprints,
    unused_misprints,
)
from espalier.harness.reports.tables.cell_verdicts import FormulaValue
from espalier.harness.reports.tables.published_tables import FOLDER
from espalier.harness.specs.commands import command

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
        misprint, claim = "" if item.verdict == "reproduced" else item.note, item.claim
        source = f"{claim.source}, fitted: {claim.fitted}" if claim.fitted else claim.source
        values.setdefault(claim.cell.key, FormulaValue(claim.value, source, misprint))
    return values


def write(judged: Sequence[JudgedClaim], folder: Path) -> None:
    """Write analytic.md (both tables) and analytic.csv (a line for each cell) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    page = f"{summary_table(judged)}\n{cells_table(judged)}"
    (folder / "analytic.md").write_text(page, encoding="utf-8")
    (folder / "analytic.csv").write_text(csv_lines(judged), encoding="utf-8")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdicts; return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m espalier tables analytic", description=about)
    parser.add_argument("--cells", action="store_true", help="print a line for each cell")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write analytic.md and analytic.csv"
    )
    parser.add_argument("--published", type=Path, default=FOLDER, help="folder of papers' files")
    options = parser.parse_args(argv)
    try:
        judged, unconfirmed = verdicts(options.published)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(console(judged, options.cells), end="")
    if options.write is not None and not _try_write(judged, options.write):
        return 2
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


def _try_write(judged: Sequence[JudgedClaim], folder: Path) -> bool:
    """Write the files; on failure print one line and return False."""
    try:
        write(judged, folder)
    except OSError as error:
        print(f"error: --write {folder}: {error.strerror}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
