"""The runner of a command's cells: admitted jobs, one loaded model at a time, rows and failures.

Rows are printed as they come; at the end tables, failures, figures and JSON lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

from espalier.harness.errors import Refused, StoreLost, UserError, print_lines
from espalier.harness.ranks import Ranks
from espalier.harness.runs import console, hints, streams, wandb_log
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.admission import Job, admit_here, check_drawn
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.progress_bar import Board
from espalier.harness.runs.single_run import CellRunner
from espalier.harness.runs.streams import StatusLine
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from espalier.harness.store import sweep_files as sweeps
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.sweep_files import SweepCell


class AdmittedCell(NamedTuple):
    """A cell as it was requested, its job, and its own overrides, empty where they are not known."""

    spec: RunSpec
    job: Job
    line: Sequence[str]


@dataclass
class Runner:
    """Runs admitted jobs one after the other; collects and prints their rows and failures.

    All processes of a launch run all jobs in the same order; only the first stores, logs and prints.

    Args:
        sweep: whether rows are printed as one table instead of one sheet.
        ranks: the processes that share each run.
        argv: the checked command line, to print it.
        waiting: the status line.
        lines: the overrides of each cell, in the order of the cells; empty where they are not known.
        out: where tables and JSON lines go.
        pool: the loaded model.
        digests: hashes of files read so far.
        board: number, progress and outcome of the cells.
        admitted: the cells that can run, in the order of the command.
        note: called for each cell without a row, with the reason and the exit code.

    Attributes:
        cells: computes the row of one job.
        rows: rows of finished cells.
        refused: cells that cannot run, each with the reason in one line.
        failures: cells that ran and have no row, each with the cause and the exit code of a command that fails for it.
    """

    sweep: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    argv: Sequence[str] = ()
    waiting: StatusLine = field(default_factory=lambda: StatusLine(quiet=True))
    lines: Sequence[Sequence[str]] = ()
    out: TextIO = field(default_factory=lambda: sys.stdout)
    pool: Pool = field(default_factory=Pool)
    digests: Digests = field(default_factory=Digests)
    board: Board = field(default_factory=Board)
    admitted: list[AdmittedCell] = field(default_factory=list)
    note: Callable[[RunSpec, str, int], None] = lambda spec, reason, code: None
    cells: CellRunner = field(init=False)
    rows: list[dict[str, Any]] = field(default_factory=list, init=False)
    refused: list[tuple[RunSpec, str]] = field(default_factory=list, init=False)
    failures: list[tuple[AdmittedCell, str, int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Create the runner of one cell."""
        group = wandb_log.group_of(self.argv) if self.sweep else None
        self.cells = CellRunner(self.ranks, self.argv, group, self.pool, board=self.board)

    @property
    def code(self) -> int:
        """The exit code of the command: the worst of its cells, 0 if none failed."""
        return max((code for _, _, code in self.failures), default=0)

    def admit(self, specs: Sequence[RunSpec]) -> None:
        """Admit all cells before the first one runs; with `refused=skip`, note those that cannot run.

        Raises:
            UserError: a cell is wrong, or is refused and `refused=error`, or no cell can run; or the rows of requested
                curves or a report would not be comparable.
        """
        lines = self.lines or [()] * len(specs)
        for number, (spec, line) in enumerate(zip(specs, lines, strict=True), 1):
            self.waiting.say(f"checking cell {number} of {len(specs)}")
            try:
                job = admit_here(spec, self.ranks, self.digests)
                self.admitted.append(AdmittedCell(spec, job, line))
            except Refused as error:
                if spec.refused == "error":
                    raise
                self.refused.append((spec, str(error)))
                self.note(spec, str(error), 2)
        if not self.admitted:
            raise UserError(self.refused[0][1])
        jobs = [cell.job for cell in self.admitted]
        check_drawn(jobs)
        self.board.cells = len(jobs)
        # Runs without a stored row, each with the model and benchmark that determine its duration.
        self.board.pending = {
            job.key: (job.spec.model.name, job.spec.benchmark.name)
            for job in jobs
            if job.spec.force or not Store(job.spec.store).run(job.key).finished
        }

    def announce(self) -> None:
        """Write the list of admitted cells to the store, for `python -m espalier sweep status`."""
        if self.ranks.rank == 0:
            # Cells of a preset's grids have no own command line: the sweep itself runs the remaining ones.
            overrides = tuple(text for text in self.argv if not text.startswith("-"))
            cells = [
                SweepCell.of(job.key, job.outline(), line or overrides)
                for _, job, line in self.admitted
            ]
            sweeps.announce(self.admitted[0].spec.store, self.argv, cells)

    def run(self, cell: AdmittedCell) -> None:
        """Run one cell and report its row.

        Raises:
            SampleErrors: samples failed; the others are in the journal.
            BudgetMismatch: a sample kept another number of tokens than requested.
        """
        row, seconds = self.cells.run(cell.job, [admitted.job for admitted in self.admitted])
        self._take(row, cell.job, seconds)

    def failed(self, cell: AdmittedCell, cause: str, code: int) -> None:
        """Note that a cell has no row.

        Args:
            cell: the cell.
            cause: the reason, in one line.
            code: the exit code of a command that fails for this reason.
        """
        self.failures.append((cell, cause, code))
        self.note(cell.spec, cause, code)
        self.board.fail(cell.job.key)

    def collect(self, job: Job, fresh: bool) -> bool:
        """Report the row that another process has stored of a job; return False if there is none.

        Args:
            job: an admitted job.
            fresh: whether the row was computed for this command.
        """
        row = Store(job.spec.store).run(job.key).row(complete=True)
        if row is not None:
            self._take({**row, "status": row["status"] if fresh else "cached"}, job, 0.0)
        return row is not None

    def finish(self) -> None:
        """Print the table of all rows, draw the files of the last cell, and end with the last row's JSON line.

        At a terminal the folders of the rows and the next command are printed instead. A sweep is compared in W&B.

        Raises:
            UserError: the rows are not enough for curves or a report.
            StoreLost: these cannot be written.
            OutputLost: standard output cannot be written.
        """
        if self.ranks.rank:
            return
        spec = self.admitted[-1].spec
        with streams.output():
            self._print()
        if self.rows:
            self._draw(spec)
        if self.cells.group is not None and spec.log == "wandb":
            wandb_log.compare(self.rows, spec, self.cells.group)

    def _take(self, row: dict[str, Any], job: Job, seconds: float) -> None:
        """Take a finished row; its JSON line is printed when the next row comes, or by `finish`."""
        self.board.finish(row, seconds)
        if self.ranks.rank == 0:
            if self.rows and console.prints_json(job.spec, self.out):
                console.print_json(self.rows[-1], self.out)
            if self.sweep:
                progress.tell_finished(row, self.board, seconds)
        self.rows.append(row)

    def _draw(self, spec: RunSpec) -> None:
        """Draw the files of a cell, and end with the last row's JSON line or the next command and its purpose."""
        left_out = [*self.refused, *self._failed]
        missing = len(self.admitted) - len(self.rows) - len(self.failures)
        try:
            for path in console.write_figures(spec, self.rows, left_out, not missing, self.waiting):
                self.waiting.clear()
                with streams.output():
                    print_lines(f"wrote {path}", file=self.out)
        except OSError as error:
            raise StoreLost(f"{error}; the rows are in the store") from error
        finally:
            self.waiting.clear()
            # The command that repeats failed cells is printed already.
            repeats = self.failures and not missing
            advice = None if repeats else hints.next_step(self.argv, self.rows, missing)
            console.print_end(spec, self.rows, advice, self.out)

    def _print(self) -> None:
        """Print the table of rows, the cells without a row and why, and the command that repeats failed cells."""
        if self.rows:
            console.print_rows(self.rows, self.out, full=not self.sweep)
        failed = self._failed
        if self.rows or (failed and self.sweep):
            console.print_left("left out", self.refused, self.out)
            console.print_left("failed", failed, self.out)
        if failed and self.sweep:
            lines = [cell.line for cell, _, _ in self.failures if cell.line]
            print_lines(f"run what failed again: {hints.rerun(self.argv, lines)}", file=self.out)

    @property
    def _failed(self) -> list[tuple[RunSpec, str]]:
        return [(cell.spec, cause) for cell, cause, _ in self.failures]
