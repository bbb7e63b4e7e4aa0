"""Run the unit tests of olmOCR-Bench on an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rapidfuzz import fuzz

from espalier.harness.errors import UserError
from espalier.harness.evaluation.scoring.unittests import text_tests as text
from espalier.harness.evaluation.scoring.unittests.equations import has_formula
from espalier.harness.evaluation.scoring.unittests.table_grid import AROUND, Grid, Place, grids

Test = Mapping[str, Any]

#: Share of a cell's characters that must be right, however many edits a test allows.
HALF = 0.5


def passes(test: Test, answer: str) -> bool:
    """Return whether an answer passes a test. No answer makes it raise.

    Formulas are compared as LaTeX (`equations.tokens`); the released evaluation renders them in a browser.

    Raises:
        UserError: the test is of an unknown type or lacks a field.
    """
    check = CHECKS.get(test.get("type", ""))
    if check is None:
        raise UserError(
            f"test {test.get('id')!r}: type={test.get('type')!r}; valid: {', '.join(CHECKS)}"
        )
    try:
        return check(test, answer)
    except KeyError as missing:
        raise UserError(
            f"test {test.get('id')!r} of type {test['type']!r} has no {missing}"
        ) from missing


def has_cell(test: Test, answer: str) -> bool:
    """Return whether a table has a cell, nearly as written, with the neighbours and headings of the test."""
    wanted = {name: text.plain(test[name]) for name in AROUND if test.get(name)}
    cell, edits = text.plain(test["cell"]), test.get("max_diffs", 0)
    return any(
        _alike(cell, grid.cells[place].text, edits) and _surrounded(grid, place, wanted, edits)
        for grid in grids(answer)
        for place in grid.cells
    )


def _surrounded(grid: Grid, place: Place, wanted: Mapping[str, str], edits: int) -> bool:
    return all(
        any(
            _alike(words, grid.cells[neighbour].text, edits)
            for neighbour in AROUND[name](grid, place)
        )
        for name, words in wanted.items()
    )


def _alike(wanted: str, cell: str, edits: int) -> bool:
    needed = max(HALF, 1 - edits / max(len(wanted), 1))
    return fuzz.ratio(wanted, text.plain(cell)) / 100 >= needed


CHECKS: dict[str, Callable[[Test, str], bool]] = {
    "present": text.has_text,
    "absent": lambda test, answer: not text.has_text(test, answer),
    "order": text.in_order,
    "table": has_cell,
    "math": lambda test, answer: has_formula(test["math"].strip(), answer),
    "baseline": text.is_well_formed,
}
