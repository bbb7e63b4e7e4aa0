"""Rebuild published tables from the store; `all` for all tables of all papers.

`fig4` instead of a number is a figure; `--out` draws it. `misprints` instead of a paper lists the printed numbers that
others contradict.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.config.group_lists import choices
from espalier.harness.errors import print_lines
from espalier.harness.paths import located, usual_store
from espalier.harness.reports.printed_text import markdown_table
from espalier.harness.reports.tables.cell_verdicts import ResultIndex, formula_values
from espalier.harness.reports.tables.published_tables import (
    KEYS,
    PrintedCell,
    papers,
    read_cells,
    read_paper,
)
from espalier.harness.reports.tables.rebuilt_table import RebuiltTable, build, requested_numbers
from espalier.harness.reports.tables.table_formats import FORMATS
from espalier.harness.reports.tables.table_rows import Notes, choose, read_rows, usual_positions
from espalier.harness.settings import Count, choice, read_value
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.specs.run_spec import POSITIONS
from espalier.harness.store.files.folder_checks import check_folder, existing_store
from espalier.harness.store.index import Walk, walk


def requested_tables(paper: str, numbers: Sequence[str]) -> list[tuple[str, str]]:
    """Return the tables named by a command line, as (paper, number) pairs.

    Raises:
        UserError: there is no such paper or table.
    """
    tables = []
    for slug in papers() if paper == "all" else [paper]:
        entry = read_paper(slug)
        for number in numbers or entry.tables:
            entry.table(number)
            tables.append((slug, number))
    return tables


def rebuild(
    tables: Sequence[tuple[str, str]],
    stores: Sequence[Path],
    model: str | None = None,
    positions: str | None = None,
    limit: int | None = None,
    read: Walk = walk,
) -> tuple[list[RebuiltTable], list[str]]:
    """Return tables filled from stores, which `read` reads, and notes on results that are in no table."""
    notes = Notes()
    rows = read_rows(stores, requested_numbers(tables, model), notes, read)
    index = ResultIndex(choose(rows, positions or usual_positions(), limit, notes))
    formulas = formula_values()
    return [build(slug, number, index, model, formulas) for slug, number in tables], notes.lines()


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print tables or write them; exit code 2 and one line if that fails."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["misprints"]:
        return print_misprints(arguments[1:])
    parser = command_parser(
        "tables",
        __doc__,
        "d2pruner 1",
        "d2pruner 3 --model seedling",
        "all --out tables",
        "misprints",
    )
    parser.add_argument("paper", help=f"{', '.join(papers())}, all or misprints")
    parser.add_argument("numbers", nargs="*", metavar="N", help="its tables (default: all)")
    parser.add_argument(
        "--store",
        type=located,
        action="append",
        help="a run store (default: results if it has runs, else results/demo)",
    )
    parser.add_argument("--model", help="an embedded model instead of the printed models")
    parser.add_argument(
        "--positions", help="use rows with this position policy (default: original)"
    )
    parser.add_argument(
        "--limit", type=int, help="use rows with this number of samples (default: the largest)"
    )
    parser.add_argument(
        "--format", choices=sorted(FORMATS), default="md", help="format of the output"
    )
    parser.add_argument(
        "--out", type=Path, help="write every format of every table into this folder"
    )
    options = parser.parse_args(arguments)
    if options.out is not None:
        check_folder("--out", options.out)
    choice("paper", options.paper, [*papers(), "all", "misprints"])
    if options.model is not None:
        choice("--model", options.model, choices("model"))
    if options.positions is not None:
        choice("--positions", options.positions, POSITIONS)
    read_value("--limit", options.limit, Count | None)
    tables, notes = rebuild(
        requested_tables(options.paper, options.numbers),
        [existing_store(store) for store in options.store or [usual_store()]],
        options.model,
        options.positions,
        options.limit,
    )
    for table in tables:
        if options.out is None:
            print(FORMATS[options.format](table))
        else:
            print_lines(*write(table, options.out))
    print_lines(*notes, file=sys.stderr)
    return 0


def write(table: RebuiltTable, folder: Path) -> list[Path]:
    """Write a table in every format, and a figure also as a picture; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    # matplotlib is only needed for figures.
    from espalier.harness.reports.tables import table_picture as picture

    paths = picture.write(table, folder) if table.entry.panels else []
    for ending, text in FORMATS.items():
        paths.append(folder / f"{table.name}.{ending}")
        paths[-1].write_text(text(table), encoding="utf-8")
    return paths


#: What `tables misprints` prints: cells are those of results/papers/misprints.csv, which formulas confirm; averages are
#: those that do not follow from the cells of their line by the paper's rule, whatever rounding took.
MISPRINTS = (
    "Every printed number that other printed numbers contradict, of all papers, in one list."
)

#: A printed number that others contradict: as printed, `cell` or `average`, the number that follows, with the printed
#: digits at least, and what contradicts it.
WrongNumber = tuple[PrintedCell, str, str, str]


def wrong_numbers() -> list[WrongNumber]:
    """Return the numbers in the order of papers and tables; one that is an average and listed counts once, as a cell.

    Raises:
        UserError: a file of results/papers is damaged.
    """
    formulas = formula_values()
    entries: list[WrongNumber] = []
    for slug in papers():
        paper = read_paper(slug)
        for number, table in paper.tables.items():
            numbers = {}
            for average in build(slug, number, ResultIndex([])).averaged:
                if table.average is not None and average.remark and average.follows is not None:
                    cell = average.cell
                    consistent = f"{average.follows:.{max(cell.digits, 2)}f}"
                    why = (
                        f"the printed cells of its line by the table's rule ({table.average.rule})"
                    )
                    numbers[cell.key] = (cell, "average", consistent, why)
            cells = {cell.key: cell for cell in read_cells(paper, number)}
            for key, formula in formulas.items():
                if formula.misprint and key in cells:
                    consistent = f"{formula.value:.{cells[key].digits}f}"
                    numbers[key] = (cells[key], "cell", consistent, formula.misprint)
            entries += numbers.values()
    return entries


def print_misprints(argv: Sequence[str]) -> int:
    """Print every printed number that other printed numbers contradict; return the exit status."""
    parser = command_parser("tables misprints", MISPRINTS, "", "--format csv")
    parser.add_argument("--format", choices=("md", "csv"), default="md", help="of the output")
    options = parser.parse_args(argv)
    entries = wrong_numbers()
    if options.format == "csv":
        lines = csv.writer(sys.stdout, lineterminator="\n")
        lines.writerow((*KEYS, "kind", "printed", "consistent", "why"))
        for cell, kind, consistent, why in entries:
            lines.writerow((*cell.key, kind, cell.value, consistent, why))
        return 0
    heads = ("number", "kind", "printed", "consistent", "why")
    rows = [(cell.name, kind, cell.value, *reason) for cell, kind, *reason in entries]
    kinds = Counter(kind for _, kind, _, _ in entries)
    reasons = Counter(why for _, kind, _, why in entries if kind == "cell")
    ((why, count),) = reasons.most_common(1)
    print(
        f"{markdown_table(heads, rows, 'llrrl')}\n{len(entries)} printed numbers that others contradict: "
        f"{kinds['cell']} cells ({count} of them: {why}), {kinds['average']} averages"
    )
    return 0
