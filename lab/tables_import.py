"""Import transcribed tables into results/papers, after checking all of them: `python -m lab.tables_import DIR`.

DIR contains `<paper>_table<N>.csv`, one line per cell. Names, counts and provenance of each paper are in
results/papers/<paper>.yaml. Every file is checked before any is written; values are copied as printed.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.errors import UserError, print_lines
from espalier.harness.reports.tables.published_tables import (
    COLUMNS,
    FOLDER,
    Paper,
    PrintedCell,
    papers,
    read_cells,
    read_paper,
)
from espalier.harness.specs.commands import command
from espalier.harness.store.files import durable
from espalier.harness.store.files.folder_checks import check_folder


def import_tables(source: Path, target: Path = FOLDER) -> list[Path]:
    """Check all tables of a folder and write them to another, with `provenance.csv` over them.

    Args:
        source: folder with a CSV for each table.
        target: folder with the papers' files, to which tables are written.

    Raises:
        UserError: a file is missing, damaged, or belongs to no known table.
    """
    if not source.is_dir():
        raise UserError(f"DIR={str(source)!r} is no folder; valid: one with <paper>_table<N>.csv")
    tables = [
        (paper, number, read_cells(paper, number, source))
        for paper in (read_paper(slug, target) for slug in papers(target))
        for number, entry in paper.tables.items()
        if not entry.grid
    ]
    names = {f"{paper.slug}_table{number}.csv" for paper, number, _ in tables}
    for path in sorted(source.glob("*.csv")):
        # Files about the tables are in the same folder.
        if path.name not in names | {"provenance.csv", "misprints.csv", "formulas.csv"}:
            raise UserError(
                f"{path} is no table of {target}/*.yaml; valid: {', '.join(sorted(names))}"
            )
    written = []
    for paper, number, cells in tables:
        path = target / f"{paper.slug}_table{number}.csv"
        durable.replace(path, _text(cells))
        written.append(path)
    durable.replace(target / "provenance.csv", _provenance(tables))
    return [*written, target / "provenance.csv"]


def _text(cells: Sequence[PrintedCell]) -> bytes:
    return _csv(COLUMNS, [[getattr(cell, name) for name in COLUMNS] for cell in cells])


def _provenance(tables: Sequence[tuple[Paper, str, tuple[PrintedCell, ...]]]) -> bytes:
    head = ("file", "paper", "arxiv", "venue", "table", "cells", "empty", "sha256")
    lines = [
        [
            f"{paper.slug}_table{number}.csv",
            *(paper.paper, paper.arxiv, paper.venue, number),
            str(len(cells)),
            str(sum(not cell.value for cell in cells)),
            hashlib.sha256(_text(cells)).hexdigest(),
        ]
        for paper, number, cells in tables
    ]
    return _csv(head, lines)


def _csv(head: Sequence[str], lines: Sequence[Sequence[str]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *lines])
    return out.getvalue().encode()


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Import a folder; exit code 2 and one line if a file is not whole."""
    parser = argparse.ArgumentParser(prog="python -m lab.tables_import", description=__doc__)
    parser.add_argument("source", type=Path, metavar="DIR", help="folder of <paper>_table<N>.csv")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the papers' files lie")
    options = parser.parse_args(argv)
    check_folder("--out", options.out)
    written = import_tables(options.source, options.out)
    print_lines(f"{len(written) - 1} tables in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
