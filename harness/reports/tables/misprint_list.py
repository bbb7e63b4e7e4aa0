"""Every printed number that other printed numbers contradict, of all papers, in one list.

Cells are those of results/papers/misprints.csv, which formulas confirm; averages are those that do not follow from the
cells of their line by the paper's rule, whatever rounding took.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Sequence

from espalier.harness.reports.printed_text import markdown_table
from espalier.harness.reports.tables.cell_verdicts import ResultIndex, formula_values
from espalier.harness.reports.tables.published_tables import (
    KEYS,
    PrintedCell,
    papers,
    read_cells,
    read_paper,
)
from espalier.harness.reports.tables.rebuilt_table import build
from espalier.harness.specs.commands import command, command_parser

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


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the list; return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = command_parser("tables misprints", about, "", "--format csv")
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
