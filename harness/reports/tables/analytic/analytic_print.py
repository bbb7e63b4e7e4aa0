"""Verdicts on published cells as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from espalier.harness.reports.tables.analytic.analytic_verdicts import Judged
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

#: What a reproduced cell may rest on: a formula with what the paper states, or with what was fitted to such cells.
BASES = ("derived", "fitted")


def summary(judged: Iterable[Judged]) -> list[tuple[str, ...]]:
    """Return a line for each column of each table; the residual is the largest among cells that are reproduced."""
    lines: list[tuple[str, ...]] = []
    for (table, column), group in groupby(_sorted(judged), _column):
        members = list(group)
        counts = Counter(one.verdict for one in members)
        good = [one.claim for one in members if one.verdict == "reproduced"]
        worst = max(good, key=lambda claim: abs(claim.residual), default=None)
        lines.append(
            (
                table,
                column,
                str(len(members)),
                *(str(sum(claim.basis == one for claim in good)) for one in BASES),
                *(str(counts[verdict]) for verdict in ("misprint", "off")),
                "" if worst is None else f"{worst.residual:+.3g} {worst.cell.unit}",
                "" if worst is None else f"{worst.tolerance:.3g} ({worst.why})",
                "; ".join(dict.fromkeys(claim.fitted for claim in good if claim.fitted)),
            )
        )
    return lines


def cells(judged: Iterable[Judged]) -> list[tuple[str, ...]]:
    """Return a line for each cell."""
    return [
        (
            one.claim.cell.name,
            f"{one.claim.cell.value} {one.claim.cell.unit}",
            f"{one.claim.value:.6g}",
            f"{one.claim.residual:+.3g}",
            f"{one.claim.tolerance:.3g}",
            "" if one.claim.exact is None else f"{one.claim.exact:.6g}",
            f"{one.verdict}: {one.note}" if one.note else one.verdict,
            f"fitted: {one.claim.fitted}" if one.claim.fitted else "derived",
            one.claim.source,
        )
        for one in judged
    ]


def console(judged: Sequence[Judged], every: bool) -> str:
    """Return what the terminal shows: a line a column, or a line a cell, and the sum."""
    lines = [CELLS, *cells(judged)] if every else [SUMMARY, *summary(judged)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = "".join(
        "  ".join(f"{part:<{width}}" for part, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )
    return f"{text}{total(judged)}\n"


def total(judged: Sequence[Judged]) -> str:
    """Return how many cells there are, what was found of them, and what the reproduced ones rest on."""
    counts = Counter(one.verdict for one in judged)
    different = len({one.claim.cell.key for one in judged})
    bases = Counter(str(one.claim.basis) for one in judged if one.verdict == "reproduced")
    return (
        f"{len(judged)} verdicts on {different} printed cells: {counts['reproduced']} reproduced, "
        f"{counts['misprint']} known misprints, {counts['off']} off; "
        f"reproduced: {', '.join(f'{bases[one]} {one}' for one in BASES)}"
    )


def summary_table(judged: Sequence[Judged]) -> str:
    """Return the summary in Markdown."""
    return _markdown(SUMMARY, summary(judged))


def cells_table(judged: Sequence[Judged]) -> str:
    """Return every cell in Markdown."""
    return _markdown(CELLS, cells(judged))


def csv_lines(judged: Iterable[Judged]) -> str:
    """Return every cell as CSV, with the columns of the published tables in front."""
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
    for one in judged:
        claim, cell = one.claim, one.claim.cell
        exact = "" if claim.exact is None else repr(claim.exact)
        found = (repr(claim.value), repr(claim.residual), repr(claim.tolerance), exact)
        out.writerow(
            (
                *(*cell.key, cell.unit, cell.value, *found),
                *(one.verdict, claim.source, one.note, claim.fitted),
            )
        )
    return text.getvalue()


def _column(one: Judged) -> tuple[str, str]:
    return f"{one.claim.cell.paper} {one.claim.cell.table}", one.claim.column


def _sorted(judged: Iterable[Judged]) -> list[Judged]:
    """Bring the cells of a column together; columns stay in the order of their first cells."""
    found = list(judged)
    first = {key: place for place, key in reversed(list(enumerate(map(_column, found))))}
    return sorted(found, key=lambda one: first[_column(one)])


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(part.replace('|', '/') for part in row)} |\n" for row in rows)
