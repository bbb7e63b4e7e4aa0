"""The outcome of a command: rows as they come; at the end tables, failures, figures and JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from espalier.harness.errors import StoreLost
from espalier.harness.ranks import Ranks
from espalier.harness.runs import console, hints, streams
from espalier.harness.runs import output as printing
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.forecast import Forecast
from espalier.harness.runs.status_line import StatusLine
from espalier.harness.specs.run_spec import RunSpec


@dataclass
class Outcome:
    """Collects and prints rows and failures; only the first process of a launch prints.

    Args:
        sweep: whether rows are printed as one table instead of one sheet.
        ranks: the processes of the command.
        argv: the checked command line, to print it.
        waiting: the status line.
        out: where tables and JSON lines go.
        forecast: number and duration of the cells.
        rows: rows of finished cells.
        left_out: cells without a row, each with the reason in one line.
        refused: how many of these were refused before the first cell ran.
        lines: the overrides of a cell by the identity of its spec, where they are known.
        codes: the exit codes of the cells that failed.
        note: called for each cell without a row, with the reason and the exit code.
    """

    sweep: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    argv: Sequence[str] = ()
    waiting: StatusLine = field(default_factory=lambda: StatusLine(quiet=True))
    out: TextIO = field(default_factory=lambda: sys.stdout)
    forecast: Forecast = field(default_factory=Forecast)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[tuple[RunSpec, str]] = field(default_factory=list)
    refused: int = 0
    lines: Mapping[int, Sequence[str]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    note: Callable[[RunSpec, str, int], None] = lambda spec, reason, code: None

    @property
    def code(self) -> int:
        """The exit code of the command: the worst of its cells, 0 if none failed."""
        return max(self.codes, default=0)

    def refuse(self, spec: RunSpec, reason: str) -> None:
        """Note that a cell is refused, before the first one runs."""
        self.left_out.append((spec, reason))
        self.refused += 1
        self.note(spec, reason, 2)

    def fail(self, spec: RunSpec, cause: str, code: int) -> None:
        """Note that a cell has no row."""
        self.left_out.append((spec, cause))
        self.codes.append(code)
        self.note(spec, cause, code)

    def take(self, row: dict[str, Any], spec: RunSpec, seconds: float) -> None:
        """Take a finished row; its JSON line is printed when the next row comes, or by `finish`."""
        if row["status"] != "cached":
            self.forecast.computed(row["run_key"], seconds)
        if self.ranks.rank == 0:
            if self.rows and printing.prints_json(spec, self.out):
                printing.print_json(self.rows[-1], self.out)
            if self.sweep:
                progress.tell_finished(row, self.forecast, seconds)
        self.rows.append(row)

    def finish(self, spec: RunSpec) -> None:
        """Print the table of all rows, draw the files of `spec`, and end with the last row's JSON line.

        At a terminal the folders of the rows and the next command are printed instead.

        Raises:
            UserError: the rows are not enough for curves or a report.
            StoreLost: these cannot be written.
            OutputLost: standard output cannot be written.
        """
        if self.ranks.rank:
            return
        with streams.output():
            self._print()
        if not self.rows:
            return
        try:
            for path in printing.write_figures(
                spec, self.rows, self.left_out, self.forecast.cells, self.waiting
            ):
                self.waiting.clear()
                with streams.output():
                    print(f"wrote {path}", file=self.out, flush=True)
        except OSError as error:
            raise StoreLost(f"{error}; the rows are in the store") from error
        finally:
            self.waiting.clear()
            printing.print_end(spec, self.rows, self._advice(), self.out)

    def _advice(self) -> tuple[str, str] | None:
        """Return the next command and its purpose; None after the command that repeats failed cells."""
        missing = self.forecast.cells - len(self.rows) - len(self.left_out)
        if self.codes and not missing:
            return None
        return hints.next_step(self.argv, self.rows, missing)

    def _print(self) -> None:
        """Print the table of rows, the cells without a row and why, and the command that repeats failed cells."""
        if self.rows:
            console.print_rows(self.rows, self.out, full=not self.sweep)
        failed = self.left_out[self.refused :]
        if self.rows or (failed and self.sweep):
            printing.print_left("left out", self.left_out[: self.refused], self.out)
            printing.print_left("failed", failed, self.out)
        if failed and self.sweep:
            lines = [self.lines[id(spec)] for spec, _ in failed if id(spec) in self.lines]
            command = hints.rerun(self.argv, lines)
            print(f"run what failed again: {command}", file=self.out, flush=True)
