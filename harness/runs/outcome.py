"""What came of the cells of a command: rows as they come; in the end tables, failures, drawings and JSON lines."""

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
from espalier.harness.runs.status_line import Waiting
from espalier.harness.specs.run_spec import RunSpec


@dataclass
class Outcome:
    """Takes rows and reasons, and tells of them; of several processes only the first prints.

    Args:
        sweep: whether rows are printed as one table instead of one sheet.
        ranks: the processes of the command.
        argv: the checked command line, for what is printed about it.
        waiting: the line that says what goes on where nothing else does.
        out: where tables and JSON lines go.
        forecast: how many cells there are, and how long they take.
        rows: what has finished.
        left_out: what has no row, each with the reason in one line.
        refused: how many of these were left out before the first cell ran.
        lines: the overrides of a cell by the identity of its spec, where they are known.
        codes: the exit codes of the cells that failed.
        note: told of each cell that is to have no row: which one, why, and with which exit code.
    """

    sweep: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    argv: Sequence[str] = ()
    waiting: Waiting = field(default_factory=lambda: Waiting(quiet=True))
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
        """Note that a cell cannot run, before the first one does."""
        self.left_out.append((spec, reason))
        self.refused += 1
        self.note(spec, reason, 2)

    def fail(self, spec: RunSpec, cause: str, code: int) -> None:
        """Note that a cell came to no row."""
        self.left_out.append((spec, cause))
        self.codes.append(code)
        self.note(spec, cause, code)

    def take(self, row: dict[str, Any], spec: RunSpec, seconds: float) -> None:
        """Take a finished row; its JSON line is printed when the next row comes, or last of all by `finish`."""
        if row["status"] != "cached":
            self.forecast.computed(row["run_key"], seconds)
        if self.ranks.rank == 0:
            if self.rows and printing.prints_json(spec, self.out):
                printing.print_json(self.rows[-1], self.out)
            if self.sweep:
                progress.tell_finished(row, self.forecast, seconds)
        self.rows.append(row)

    def finish(self, spec: RunSpec) -> None:
        """Print the table of all rows, draw what `spec` asks for, and end with the last row's JSON line.

        A person at a terminal is told instead where the rows lie, and what to run next.

        Raises:
            UserError: the rows do not give curves or a report.
            StoreLost: these cannot be written.
            OutputLost: standard output takes nothing.
        """
        if self.ranks.rank:
            return
        with streams.output():
            self._print()
        if not self.rows:
            return
        try:
            for path in printing.drawn(
                spec, self.rows, self.left_out, self.forecast.cells, self.waiting
            ):
                self.waiting.clear()
                with streams.output():
                    print(f"wrote {path}", file=self.out, flush=True)
        except OSError as error:
            raise StoreLost(f"{error}; the rows are in the store") from error
        finally:
            self.waiting.clear()
            if printing.prints_json(spec, self.out):
                printing.print_json(self.rows[-1], self.out)
            else:
                printing.print_advice(spec, self.rows, self._advice(), self.out)

    def _advice(self) -> tuple[str, str] | None:
        """Return the next command and what it is for; None where the one that runs again what failed stands above."""
        missing = self.forecast.cells - len(self.rows) - len(self.left_out)
        if self.codes and not missing:
            return None
        return hints.next_step(self.argv, self.rows, missing)

    def _print(self) -> None:
        """Print what there is: a table of the rows, what has none and why, and how to run again what failed."""
        if self.rows:
            console.print_rows(self.rows, self.out, full=not self.sweep)
        failed = self.left_out[self.refused :]
        if self.rows or (failed and self.sweep):
            printing.print_left("left out", self.left_out[: self.refused], self.out)
            printing.print_left("failed", failed, self.out)
        if failed and self.sweep:
            lines = [self.lines[id(spec)] for spec, _ in failed if id(spec) in self.lines]
            again = hints.rerun(self.argv, lines)
            print(f"run what failed again: {again}", file=self.out, flush=True)
