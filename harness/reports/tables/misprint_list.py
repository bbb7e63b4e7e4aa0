"""Every printed number that other printed numbers contradict, of all papers, in one list.

Cells are those of results/papers/misprints.csv, which formulas confirm; averages are those that do not follow from the
cells of their line by the paper's rule, whatever rounding took.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class WrongNumber:
    """A printed number that others contradict.

    Attributes:
        cell: as printed.
        kind: `cell` or `average`.
        consistent: the number that follows, with the printed digits at least.
        why: what contradicts it.
    """

    cell: PrintedCell
    kind: str
    consistent: str
    why: str


def wrong_numbers() -> list[WrongNumber]:
    """Return the numbers in the order of papers and tables; one that is an average and listed counts once, as a cell.

    Raises:
        UserError: a file of results/papers is damaged.
    """
    formulas = formula_values()
    entries: list[WrongNumber] = []
    for slug in papers():
        for number in read_paper(slug).tables:
            averages = {entry.cell.key: entry for entry in _averages(slug, number)}
            cells = {cell.key: cell for cell in read_cells(read_paper(slug), number)}
            misprints = {
                key: WrongNumber(
                    cells[key], "cell", f"{formula.value:.{cells[key].digits}f}", formula.misprint
                )
                for key, formula in formulas.items()
                if formula.misprint and key in cells
            }
            entries += (averages | misprints).values()
    return entries


def _averages(slug: str, number: str) -> Iterator[WrongNumber]:
    rule = read_paper(slug).tables[number].average
    for average in [] if rule is None else build(slug, number, ResultIndex([])).averaged:
        if rule is not None and average.remark and average.follows is not None:
            consistent = f"{average.follows:.{max(average.cell.digits, 2)}f}"
            why = f"the printed cells of its line by the table's rule ({rule.rule})"
            yield WrongNumber(average.cell, "average", consistent, why)


def total(entries: Sequence[WrongNumber]) -> str:
    """Return the counts by kind, and the reason of most cells."""
    kinds = Counter(entry.kind for entry in entries)
    why, count = Counter(entry.why for entry in entries if entry.kind == "cell").most_common(1)[0]
    return (
        f"{len(entries)} printed numbers that others contradict: {kinds['cell']} cells ({count} of them: {why}), "
        f"{kinds['average']} averages"
    )


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
        for entry in entries:
            cell = entry.cell
            lines.writerow((*cell.key, entry.kind, cell.value, entry.consistent, entry.why))
        return 0
    print("| number | kind | printed | consistent | why |\n| --- | --- | ---: | ---: | --- |")
    for entry in entries:
        cell = entry.cell
        print(f"| {cell.name} | {entry.kind} | {cell.value} | {entry.consistent} | {entry.why} |")
    print(f"\n{total(entries)}")
    return 0
