"""Printed cells beside what rows measure of them, and a verdict on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from espalier.harness.reports.tables.cell_runs import Wanted, method_of, wanted
from espalier.harness.reports.tables.cell_settings import compared
from espalier.harness.reports.tables.printed_cell import UNITS, Cell
from espalier.harness.reports.tables.published_tables import Paper
from espalier.harness.reports.tables.table_rows import Measured, Notes

#: Begins the paths of scores.
METRICS = "metrics."

#: Standard errors on either side of a 95 % interval.
WIDTH = 1.96


@dataclass(frozen=True)
class Formula:
    """What a formula says of a cell, in its unit.

    Attributes:
        value: the formula's.
        source: the formula, by its equation.
        misprint: why the printed number is known to be wrong; empty where print and formula agree.
    """

    value: float
    source: str
    misprint: str = ""


@dataclass(frozen=True)
class Filled:
    """A printed cell and what is known of it.

    Attributes:
        cell: the printed one.
        run: what fills it, or why nothing does.
        value, stderr: measured, in the printed unit; None where nothing ran.
        row: where that comes from.
        analytic: what a formula says of the cell; None where none does.
        remark: of an average, what does not follow in print.
        apart: of an average, why it need not be the printed one.
        unread: whether it is a score of a row, or of several, of which too many answers could not be read.
    """

    cell: Cell
    run: Wanted | str
    value: float | None = None
    stderr: float | None = None
    row: Measured | None = None
    analytic: Formula | None = None
    remark: str = ""
    apart: str = ""
    unread: bool = False

    @property
    def difference(self) -> float | None:
        """Measured less printed, where these are meant to be the same."""
        if self.value is None or not self.cell.value or self.unlike:
            return None
        return self.value - self.cell.number

    @property
    def unlike(self) -> str:
        """Why the measured number need not be the printed one; empty where it is meant to be."""
        return self.run.unlike if isinstance(self.run, Wanted) else self.apart

    @property
    def verdict(self) -> str:
        """What the difference means: near, within error, FAR; `missing` and other words where there is none."""
        if not self.cell.value and self.value is None:
            return "not printed"
        if self.value is None:
            without = "printed" if self.analytic is None else "formula"
            return "missing" if isinstance(self.run, Wanted) else without
        if self.difference is None:
            return "measured"
        part = "" if self.row is None or self.row.whole else ", of a part"
        allowed = UNITS[self.cell.unit]
        if allowed is None:
            return "another machine" + part
        off = round(abs(self.difference), 9)
        if off <= allowed + self.cell.half:
            return "near" + part
        error = 0.0 if self.stderr is None else WIDTH * self.stderr
        return ("within error" if off <= error + self.cell.half else "FAR") + part


class Shelf:
    """Rows by the cell that they fill and by their settings; the newest counts."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        """Sort rows, the oldest first."""
        self._by_cell: dict[tuple[Any, ...], dict[int, list[Measured]]] = {}
        for row in rows:
            # Equal settings are one object (rows.py), so that what a run asks is held against each but once.
            self._by_cell.setdefault(row.cell, {}).setdefault(id(row.settings), []).append(row)

    def find(self, run: Wanted, notes: Notes) -> Measured | None:
        """Return the newest row of a run; rows of the same cell that give way to it are noted."""
        name, variant, _ = method_of(run)
        asked = run.overrides
        ratio = round(float(asked["ratio"]), 6)
        cell = (asked["model"], asked["benchmark"], name, variant, ratio, asked["budget"])
        found = []
        apart = {}
        for group in self._by_cell.get(cell, {}).values():
            difference = compared(run).difference(group[0].settings)
            if difference:
                apart[group[0].key] = difference
            else:
                found += group
        if not found:
            for key, difference in apart.items():
                notes.add(
                    "rows of other settings than a cell's, which none fills", f"{key} {difference}"
                )
            return None
        newest = max(found, key=lambda row: (row.committed, row.key))
        for other in found:
            if other is not newest:
                why = "other code" if other.code != newest.code else "other settings or seed"
                notes.add(
                    "rows of a cell that a newer one fills",
                    f"{other.key} gives way to {newest.key} ({why})",
                )
        return newest


def fill(
    paper: Paper,
    cells: Sequence[Cell],
    shelf: Shelf,
    notes: Notes,
    model: str | None = None,
    analytic: Mapping[tuple[str, ...], Formula] | None = None,
) -> list[Filled]:
    """Return each cell with what is measured of it; averages are left to harness/reports/tables/table_averages.py.

    Args:
        paper: the paper's file.
        cells: of one table.
        shelf: rows to choose from.
        notes: gets what is said of rows: several of one cell, several versions of code in one table.
        model: run on this model in place of the cells' own.
        analytic: what formulas say, by the key of a cell.
    """
    said = analytic or {}
    filled = []
    for cell in cells:
        run = wanted(paper, cell, model)
        one = Filled(cell, run, analytic=said.get(cell.key))
        row = None if isinstance(run, str) else shelf.find(run, notes)
        if row is not None and isinstance(run, Wanted):
            one = _measured(one, run, row)
        filled.append(one)
    versions: dict[str, str] = {}
    for one in filled:
        if one.row is not None:
            versions.setdefault(one.row.code, one.row.key)
    if len(versions) > 1:
        for code, key in versions.items():
            notes.add("versions of code stand in one table", f"{code} ({key} and others)")
    return filled


def _measured(one: Filled, run: Wanted, row: Measured) -> Filled:
    value = row.numbers.get(run.of)
    if value is None:
        return replace(one, run=f"row {row.key} has no {run.of}")
    error = row.numbers.get(error_of(run.of))
    stderr = None if error is None else error * run.scale
    unread = row.unread and run.of.startswith(METRICS)
    return replace(one, value=value * run.scale, stderr=stderr, row=row, unread=unread)


def error_of(path: str) -> str:
    """Return where a row has the standard error of a number, if it has one."""
    return f"{path.removesuffix('value')}stderr"
