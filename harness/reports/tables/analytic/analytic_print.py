"""Verdicts on published cells as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from espalier.harness.reports.tables.analytic.analytic_verdicts import JudgedClaim
from espalier.harness.reports.tables.printed_cell import KEYS

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
    *("verdict", "basis", "source"),
)

#: Basis of a reproduced cell: a formula with values that the paper states, or with values fitted to such cells.
BASES = ("derived", "fitted")


def summary(judged: Iterable[JudgedClaim]) -> list[tuple[str, ...]]:
    """Return a line for each column of each table, with the largest residual of its reproduced cells."""
    lines: list[tuple[str, ...]] = []
    for (table, column), group in groupby(_sorted(judged), _column):
        members = list(group)
        counts = Counter(item.verdict for item in members)
        reproduced = [item.claim for item in members if item.verdict == "reproduced"]
        largest = max(reproduced, key=lambda claim: abs(claim.residual), default=None)
        lines.append(
            (
                table,
                column,
                str(len(members)),
                *(str(sum(claim.basis == item for claim in reproduced)) for item in BASES),
                *(str(counts[verdict]) for verdict in ("misprint", "off")),
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
            f"fitted: {item.claim.fitted}" if item.claim.fitted else "derived",
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
    """Return the counts of cells and verdicts, and the bases of the reproduced ones."""
    counts = Counter(item.verdict for item in judged)
    cell_count = len({item.claim.cell.key for item in judged})
    bases = Counter(str(item.claim.basis) for item in judged if item.verdict == "reproduced")
    return (
        f"{len(judged)} verdicts on {cell_count} printed cells: {counts['reproduced']} reproduced, "
        f"{counts['misprint']} known misprints, {counts['off']} off; "
        f"reproduced: {', '.join(f'{bases[item]} {item}' for item in BASES)}"
    )


def summary_table(judged: Sequence[JudgedClaim]) -> str:
    """Return the summary in Markdown."""
    return _markdown(SUMMARY, summary(judged))


def cells_table(judged: Sequence[JudgedClaim]) -> str:
    """Return all cells in Markdown."""
    return _markdown(CELLS, cells(judged))


def csv_lines(judged: Iterable[JudgedClaim]) -> str:
    """Return all cells as CSV, starting with the columns of the published tables."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(
        (
            *KEYS,
            "unit",
            "printed",
            "formula",
            "residual",
            "allowed",
            "exact",
            "verdict",
            "source",
            "note",
            "fitted",
        )
    )
    for item in judged:
        claim, cell = item.claim, item.claim.cell
        exact = "" if claim.exact is None else repr(claim.exact)
        numbers = (repr(claim.value), repr(claim.residual), repr(claim.tolerance), exact)
        out.writerow(
            (
                *(*cell.key, cell.unit, cell.value, *numbers),
                *(item.verdict, claim.source, item.note, claim.fitted),
            )
        )
    return text.getvalue()


def _column(item: JudgedClaim) -> tuple[str, str]:
    return f"{item.claim.cell.paper} {item.claim.cell.table}", item.claim.column


def _sorted(judged: Iterable[JudgedClaim]) -> list[JudgedClaim]:
    """Group the cells of a column; columns stay in the order of their first cells."""
    claims = list(judged)
    first = {key: place for place, key in reversed(list(enumerate(map(_column, claims))))}
    return sorted(claims, key=lambda item: first[_column(item)])


def _markdown(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(part.replace('|', '/') for part in row)} |\n" for row in rows)
