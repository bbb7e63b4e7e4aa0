"""`python -m espalier tables d2pruner 1`: a published table rebuilt from the store; `all` for all of them.

`fig4` in the place of a number is a figure; `--out` draws it.

`python -m espalier tables analytic` holds what formulas alone give against what is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.config.group_lists import choices
from espalier.harness.errors import UserError, unknown_name
from espalier.harness.paths import rooted
from espalier.harness.reports.tables.analytic import formulas as analytic
from espalier.harness.reports.tables.cell_verdicts import Shelf
from espalier.harness.reports.tables.published_tables import papers, read_paper
from espalier.harness.reports.tables.rebuilt_table import Table, asked_numbers, build
from espalier.harness.reports.tables.table_formats import FORMATS
from espalier.harness.reports.tables.table_rows import Notes, choose, read_rows, usual_positions
from espalier.harness.settings import Count, choice, read_value
from espalier.harness.specs.commands import command
from espalier.harness.specs.run_spec import POSITIONS
from espalier.harness.store.files.folder_checks import check_folder, existing_store


def asked(paper: str, numbers: Sequence[str]) -> list[tuple[str, str]]:
    """Return the tables that a command line names, each as paper and number.

    Raises:
        UserError: there is no such paper or table.
    """
    found = []
    for slug in papers() if paper == "all" else [paper]:
        entry = read_paper(slug)
        for number in numbers or entry.tables:
            entry.table(number)
            found.append((slug, number))
    return found


def rebuild(
    tables: Sequence[tuple[str, str]],
    stores: Sequence[Path],
    model: str | None = None,
    positions: str | None = None,
    limit: int | None = None,
) -> tuple[list[Table], list[str]]:
    """Return tables with what stores say of them, and what is said of rows that count in none."""
    notes = Notes()
    rows = read_rows(stores, asked_numbers(tables, model), notes)
    shelf = Shelf(choose(rows, positions or usual_positions(), limit, notes))
    said = analytic.formulas()
    return [build(slug, number, shelf, model, said) for slug, number in tables], notes.lines()


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print tables or write them; exit code 2 and one line if that cannot be done."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["analytic"]:
        return analytic.main(given[1:])
    parser = argparse.ArgumentParser(prog="python -m espalier tables", description=__doc__)
    parser.add_argument("paper", help=f"{', '.join(papers())}, all, or analytic")
    parser.add_argument("numbers", nargs="*", metavar="N", help="tables of it; all by default")
    parser.add_argument(
        "--store", type=rooted, action="append", help="a run store (default: results)"
    )
    parser.add_argument("--model", help="an embedded model in place of the printed ones")
    parser.add_argument("--positions", help="rows under this position policy (default: original)")
    parser.add_argument("--limit", type=int, help="rows of so many samples (default: the most)")
    parser.add_argument("--format", choices=sorted(FORMATS), default="md", help="what is printed")
    parser.add_argument("--out", type=Path, help="folder that gets every format of every table")
    options = parser.parse_args(given)
    known = [*papers(), "all", "analytic"]
    try:
        if options.out is not None:
            check_folder("--out", options.out)
        if options.paper not in known:
            raise unknown_name("paper", options.paper, known)
        if options.model is not None and options.model not in choices("model"):
            raise unknown_name("--model", options.model, choices("model"))
        if options.positions is not None:
            choice("--positions", options.positions, POSITIONS)
        read_value("--limit", options.limit, Count | None)
        found, notes = rebuild(
            asked(options.paper, options.numbers),
            [existing_store(store) for store in options.store or [rooted("results")]],
            options.model,
            options.positions,
            options.limit,
        )
        for table in found:
            if options.out is None:
                print(FORMATS[options.format](table))
            else:
                print("\n".join(map(str, write(table, options.out))))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads has had enough, as `head` has; what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    for note in notes:
        print(note, file=sys.stderr)
    return 0


def write(table: Table, folder: Path) -> list[Path]:
    """Write a table in every format, a figure as a picture as well; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    # Imported here: tables need no drawing.
    from espalier.harness.reports.tables import table_picture as picture

    paths = picture.write(table, folder) if table.entry.panels else []
    for ending, text in FORMATS.items():
        paths.append(folder / f"{table.name}.{ending}")
        paths[-1].write_text(text(table), encoding="utf-8")
    return paths


if __name__ == "__main__":
    sys.exit(main())
