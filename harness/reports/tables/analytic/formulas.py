"""Which printed figures do formulas give? `python -m espalier tables analytic [--cells] [--write FOLDER]`.

Published cells are read from results/papers/*.csv, known misprints from misprints.csv beside them; no model is needed.
Exit status 0: every cell is the formula's within its tolerance, or a known misprint. 1: some cell is not, and standard
error names it. 2: a table is missing, damaged, or holds what no formula can read.
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
    Claim,
    Judged,
    Misprint,
    judge,
    misprints,
    unused,
)
from espalier.harness.reports.tables.cell_verdicts import Formula
from espalier.harness.reports.tables.published_tables import FOLDER
from espalier.harness.specs.commands import command

#: Every paper's claims on its tables, by the folder that holds them.
PAPERS: tuple[Callable[[Path], Iterator[Claim]], ...] = (
    analytic_d2pruner.claims,
    analytic_d3tom.claims,
    analytic_rtprune.claims,
    analytic_aircache.claims,
    analytic_parallelvlm.claims,
)


def verdicts(folder: Path = FOLDER) -> tuple[list[Judged], list[Misprint]]:
    """Return the verdict on every claim, and listed misprints that were not found to be any.

    Raises:
        UserError: a table is missing or damaged, or has a cell that no formula can read.
    """
    known = misprints(folder / "misprints.csv")
    judged = judge((claim for claims in PAPERS for claim in claims(folder)), known)
    return judged, unused(judged, known)


def formulas(folder: Path = FOLDER) -> dict[tuple[str, ...], Formula]:
    """Return what formulas say of published cells, by the key of a cell; of several the one that is claimed first.

    Raises:
        UserError: as `verdicts`.
    """
    found: dict[tuple[str, ...], Formula] = {}
    for one in verdicts(folder)[0]:
        wrong, claim = "" if one.verdict == "reproduced" else one.note, one.claim
        source = f"{claim.source}, fitted: {claim.fitted}" if claim.fitted else claim.source
        found.setdefault(claim.cell.key, Formula(claim.value, source, wrong))
    return found


def write(judged: Sequence[Judged], folder: Path) -> None:
    """Write analytic.md (both tables) and analytic.csv (a line a cell) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    page = f"{summary_table(judged)}\n{cells_table(judged)}"
    (folder / "analytic.md").write_text(page, encoding="utf-8")
    (folder / "analytic.csv").write_text(csv_lines(judged), encoding="utf-8")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdicts; return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m espalier tables analytic", description=about)
    parser.add_argument("--cells", action="store_true", help="a line for each cell")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="analytic.md and analytic.csv")
    parser.add_argument("--published", type=Path, default=FOLDER, help="folder of papers' files")
    asked = parser.parse_args(argv)
    try:
        judged, left = verdicts(asked.published)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(console(judged, asked.cells), end="")
    if asked.write is not None and not _written(judged, asked.write):
        return 2
    wrong = [one for one in judged if one.verdict == "off"]
    for one in wrong:
        cell = one.claim.cell
        print(
            f"off: {cell.name}: printed {cell.value}, {one.claim.source} gives {one.claim.value:.6g}: {one.note}",
            file=sys.stderr,
        )
    for line in left:
        print(
            f"off: misprints.csv lists {', '.join(filter(None, line.key))}: no claim finds it wrong",
            file=sys.stderr,
        )
    return 1 if wrong or left else 0


def _written(judged: Sequence[Judged], folder: Path) -> bool:
    """Write the files, or say in one line why not."""
    try:
        write(judged, folder)
    except OSError as error:
        print(f"error: --write {folder}: {error.strerror}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
