"""Fill printed cells with measured results, and give a verdict on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from espalier.harness.reports.tables.cell_runs import CellRun, method_of, run_of_cell
from espalier.harness.reports.tables.cell_settings import compared_settings
from espalier.harness.reports.tables.published_tables import (
    FOLDER,
    KEYS,
    Paper,
    PrintedCell,
    read_lines,
)
from espalier.harness.reports.tables.table_rows import MeasuredResult, Notes
from espalier.harness.specs.commands import RUN

#: Columns of formulas.csv.
FORMULA_COLUMNS = (*KEYS, "formula", "source", "misprint", "basis")

#: Prefix of the paths of scores.
METRICS = "metrics."

#: Half width of a 95 % interval in standard errors.
WIDTH = 1.96


@dataclass(frozen=True)
class FormulaValue:
    """The value of a formula for a cell, in the cell's unit.

    Attributes:
        source: the formula, by its equation.
        basis: whether it is independent of the printed cells, or was fitted to them.
        misprint: why the printed number is known to be wrong; empty if print and formula agree.
    """

    value: float
    source: str
    misprint: str = ""
    basis: Literal["derived", "fitted"] = "derived"


def formula_values(folder: Path = FOLDER) -> dict[tuple[str, ...], FormulaValue]:
    """Return the values of formulas by the key of a cell, from the file that lab/analytic/formulas.py writes."""
    values = {}
    for line in read_lines(folder / "formulas.csv"):
        *key, number, source, misprint, basis = line
        values[tuple(key)] = FormulaValue(float(number), source, misprint, basis)  # type: ignore[arg-type]
    return values


@dataclass(frozen=True)
class FilledCell:
    """A printed cell with its measured result.

    Attributes:
        cell: the printed cell.
        run: the run that fills it, or why none does.
        value, stderr: measured, in the printed unit; None without a result.
        row: the result.
        analytic: the value of a formula for the cell; None if there is no formula.
        remark: the inconsistency of an average in print.
        average_mismatch: of an average, why it need not equal the printed one.
        unread: whether too many answers of a score's result could not be parsed.
    """

    cell: PrintedCell
    run: CellRun | str
    value: float | None = None
    stderr: float | None = None
    row: MeasuredResult | None = None
    analytic: FormulaValue | None = None
    remark: str = ""
    average_mismatch: str = ""
    unread: bool = False

    @property
    def printed(self) -> float | None:
        """The printed number; None if there is none."""
        return self.cell.number if self.cell.value else None

    @property
    def has_number(self) -> bool:
        """Whether there is a printed or a measured number."""
        return bool(self.cell.value) or self.value is not None

    @property
    def difference(self) -> float | None:
        """Measured minus printed, if the two should be equal."""
        if self.value is None or not self.cell.value or self.mismatch:
            return None
        return self.value - self.cell.number

    @property
    def mismatch(self) -> str:
        """Why the measured number need not equal the printed one; empty if it should."""
        return self.run.mismatch if isinstance(self.run, CellRun) else self.average_mismatch

    @property
    def verdict(self) -> str:
        """The verdict on the difference of a measured cell: near, within error, FAR; other words without a difference.

        Of a cell that no run fills: `derived` or `fitted`, the basis of its formula, `printed` without one.
        """
        if not self.has_number:
            return "not printed"
        if self.value is None:
            unfilled = "printed" if self.analytic is None else self.analytic.basis
            return "missing" if isinstance(self.run, CellRun) else unfilled
        if self.difference is None:
            return "measured"
        part = "" if self.row is None or self.row.complete else ", of a part"
        allowed = self.cell.allowed
        if allowed is None:
            return "another machine" + part
        distance = round(abs(self.difference), 9)
        if distance <= allowed + self.cell.half:
            return "near" + part
        error = 0.0 if self.stderr is None else WIDTH * self.stderr
        return ("within error" if distance <= error + self.cell.half else "FAR") + part

    @property
    def missing(self) -> str:
        """The command that fills a cell without a number, or why there is none; empty if it has a number."""
        if self.value is not None:
            return ""
        return f"{RUN} {' '.join(self.run.line)}" if isinstance(self.run, CellRun) else self.run

    def columns(self) -> dict[str, Any]:
        """Return the cell as a line of its table's frame: the printed columns, then those of the result."""
        row, formula = self.row, self.analytic
        return {
            **asdict(self.cell),
            "measured": self.value,
            "stderr": self.stderr,
            "difference": self.difference,
            "verdict": self.verdict,
            "samples": row and row.samples,
            "whole": row and row.complete,
            "unread": row and self.unread,
            "run_key": row and row.key,
            "analytic": formula and formula.value,
            "formula": formula and formula.source,
            "misprint": formula and formula.misprint,
            "remark": self.remark,
            "missing": self.missing,
        }


class ResultIndex:
    """Results by the cell that they fill and by their settings; the newest is used."""

    def __init__(self, rows: Sequence[MeasuredResult]) -> None:
        """Index results, oldest first."""
        self._by_cell: dict[tuple[Any, ...], dict[int, list[MeasuredResult]]] = {}
        for row in rows:
            # Equal settings are one object (table_rows.py), so that each is compared with a run only once.
            self._by_cell.setdefault(row.cell, {}).setdefault(id(row.settings), []).append(row)

    def find(self, run: CellRun, notes: Notes) -> MeasuredResult | None:
        """Return the newest result of a run; older and non-matching results of the same cell are noted."""
        name, variant, _ = method_of(run)
        model, benchmark, ratio, rule = (
            run.overrides[key] for key in ("model", "benchmark", "ratio", "budget")
        )
        cell = (model, benchmark, name, variant, rule, round(float(ratio), 6))
        matches = []
        differences = {}
        for group in self._by_cell.get(cell, {}).values():
            difference = compared_settings(run).difference(group[0].settings)
            if difference:
                differences[group[0].key] = difference
            else:
                matches += group
        if not matches:
            for key, difference in differences.items():
                notes.add(
                    "rows of other settings than a cell's, which none fills", f"{key} {difference}"
                )
            return None
        newest = max(matches, key=lambda row: (row.committed, row.key))
        for older in matches:
            if older is not newest:
                why = "other code" if older.code != newest.code else "other settings or seed"
                notes.add(
                    "rows of a cell that a newer one fills",
                    f"{older.key} gives way to {newest.key} ({why})",
                )
        return newest


def fill(
    paper: Paper,
    cells: Sequence[PrintedCell],
    index: ResultIndex,
    notes: Notes,
    model: str | None = None,
    analytic: Mapping[tuple[str, ...], FormulaValue] | None = None,
) -> list[FilledCell]:
    """Return the cells with their measured results; averages are added by harness/reports/tables/rebuilt_table.py.

    Args:
        paper: the paper's file.
        cells: of one table.
        index: the results.
        notes: receives notes on results: several of one cell, several code versions in one table.
        model: run on this model instead of the cells' own.
        analytic: values of formulas, by the key of a cell.
    """
    filled = []
    versions: dict[str, str] = {}
    for cell in cells:
        run, formula = run_of_cell(paper, cell, model), (analytic or {}).get(cell.key)
        row = None if isinstance(run, str) else index.find(run, notes)
        if row is None or isinstance(run, str):
            filled.append(FilledCell(cell, run, analytic=formula))
        elif (value := row.numbers.get(run.number_path)) is None:
            reason = f"row {row.key} has no {run.number_path}"
            filled.append(FilledCell(cell, reason, analytic=formula))
        else:
            error = row.numbers.get(error_of(run.number_path))
            stderr = None if error is None else error * run.scale
            unread = row.unread and run.number_path.startswith(METRICS)
            measured = (value * run.scale, stderr, row, formula)
            filled.append(FilledCell(cell, run, *measured, unread=unread))
            versions.setdefault(row.code, row.key)
    if len(versions) > 1:
        for code, key in versions.items():
            notes.add("versions of code are in one table", f"{code} ({key} and others)")
    return filled


def error_of(path: str) -> str:
    """Return the path of a number's standard error in a row."""
    return f"{path.removesuffix('value')}stderr"
