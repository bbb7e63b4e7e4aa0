"""The runner of a command's cells: admitted jobs, one loaded model at a time, rows and their outcome.

The outcome prints rows as they come; at the end tables, failures, figures and JSON lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from espalier.harness.errors import Refused, StoreLost, UserError, print_lines
from espalier.harness.ranks import Ranks
from espalier.harness.runs import console, hints, streams, wandb_log
from espalier.harness.runs import output as printing
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.admission import Job, admit_here, check_drawn
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.progress_bar import Board, BoardCell, Forecast
from espalier.harness.runs.single_run import CellRunner
from espalier.harness.runs.status_line import StatusLine
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir, Store
from espalier.harness.store import sweep_files as sweeps
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.sweep_files import SweepCell


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
                    print_lines(f"wrote {path}", file=self.out)
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
            print_lines(f"run what failed again: {command}", file=self.out)


@dataclass
class Runner:
    """Runs admitted jobs one after the other and reports their rows.

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
        jobs: the admitted jobs, each with its cell.

    Attributes:
        cells: computes the row of one job.
        outcome: rows and failures so far.
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
    jobs: list[tuple[RunSpec, Job]] = field(default_factory=list)
    cells: CellRunner = field(init=False)
    outcome: Outcome = field(init=False)
    _admitted: dict[int, Job] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Create the runner of one cell, and the report on all cells."""
        group = wandb_log.group_of(self.argv) if self.sweep else None
        self.cells = CellRunner(self.ranks, self.argv, group, self.pool, board=self.board)
        self.outcome = Outcome(
            self.sweep, self.ranks, self.argv, self.waiting, self.out, self.board.forecast
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of finished cells."""
        return self.outcome.rows

    def admit(self, specs: Sequence[RunSpec]) -> None:
        """Admit all cells before the first one runs; with `refused=skip`, note those that cannot run.

        Raises:
            UserError: a cell is wrong, or is refused and `refused=error`, or no cell can run; or the rows of requested
                curves or a report would not be comparable.
        """
        for number, spec in enumerate(specs, 1):
            self.waiting.say(f"checking cell {number} of {len(specs)}")
            try:
                self.jobs.append((spec, admit_here(spec, self.ranks, self.digests)))
            except Refused as error:
                if spec.refused == "error":
                    raise
                self.outcome.refuse(spec, str(error))
        if not self.jobs:
            raise UserError(self.outcome.left_out[0][1])
        jobs = [job for _, job in self.jobs]
        check_drawn(jobs)
        self.board.forecast.expect(len(specs), _pending(jobs))
        self.board.expect([place_of(job) for job in jobs])
        self._admitted = {id(spec): job for spec, job in self.jobs}
        self._refused = {id(spec) for spec, _ in self.outcome.left_out}
        self.outcome.lines = dict(zip(map(id, specs), self.lines, strict=False))

    def announce(self, specs: Sequence[RunSpec]) -> None:
        """Write the list of admitted cells to the store, for `python -m espalier sweep status`.

        Args:
            specs: the cells of the command, as passed to `admit`.
        """
        if self.ranks.rank == 0:
            # Cells of a preset's grids have no own command line: the sweep itself runs the remaining ones.
            overrides = tuple(text for text in self.argv if not text.startswith("-"))
            lines = self.lines or [overrides] * len(specs)
            admitted = {id(spec): job for spec, job in self.jobs}
            cells = [
                SweepCell.of(job.key, job.outline(), line)
                for job, line in zip(map(admitted.get, map(id, specs)), lines, strict=True)
                if job is not None
            ]
            sweeps.announce(specs[0].store, self.argv, cells)

    def run(self, spec: RunSpec) -> None:
        """Run one cell and report its row; a refused cell is skipped.

        Raises:
            SampleErrors: samples failed; the others are in the journal.
            BudgetMismatch: a sample kept another number of tokens than requested.
        """
        self.board.forecast.cell += 1
        if id(spec) in self._refused:
            return
        job = self._job(spec)
        self.board.begin(place_of(job))
        row, seconds = self.cells.run(job, [other_job for _, other_job in self.jobs])
        self.board.finish(place_of(job), row)
        self.outcome.take(row, spec, seconds)

    def failed(self, spec: RunSpec, cause: str, code: int) -> None:
        """Note that a cell has no row.

        Args:
            spec: the cell.
            cause: the reason, in one line.
            code: the exit code of a command that fails for this reason.
        """
        self.outcome.fail(spec, cause, code)
        job = self._job(spec)
        self.board.fail(place_of(job), cause)
        # It takes no more time.
        self.board.forecast.pending.pop(job.key, None)

    def stored(self, job: Job) -> dict[str, Any] | None:
        """Return the stored row of an admitted job; None if the job must run.

        Raises:
            UserError: the stored row is damaged or belongs to another run, and `force` is not set.
        """
        # The folder is not created here, since this only reads.
        return self.cells.stored(job, RunDir(job.spec.store / "runs" / job.key))

    def collect(self, job: Job, fresh: bool) -> bool:
        """Report the row that another process has stored of a job; return False if there is none.

        Args:
            job: an admitted job.
            fresh: whether the row was computed for this command.
        """
        row = Store(job.spec.store).run(job.key).row(complete=True)
        if row is None:
            return False
        self.board.finish(place_of(job), row)
        status = row["status"] if fresh else "cached"
        self.outcome.take({**row, "status": status}, job.spec, 0.0)
        return True

    def finish(self, spec: RunSpec) -> None:
        """Print the outcome of all cells, draw the files of `spec` (`Outcome.finish`), and compare the rows in W&B."""
        self.outcome.finish(spec)
        if self.cells.group is not None and spec.log == "wandb" and self.ranks.rank == 0:
            wandb_log.compare(self.rows, spec, self.cells.group)

    def _job(self, spec: RunSpec) -> Job:
        """Return the job of a cell; a cell that was not admitted before is admitted now."""
        job = self._admitted.get(id(spec))
        if job is None:
            return admit_here(spec, self.ranks, self.digests)
        self.ranks.use_device(spec.model.device)
        return job


def place_of(job: Job) -> BoardCell:
    """Return the position of a run on the board of its sweep."""
    method, budget = f"{job.spec.method.title} {job.label}".strip(), job.spec.budget
    return BoardCell(job.spec.benchmark.name, method, budget.ratio, budget.count)


def _pending(jobs: Sequence[Job]) -> dict[str, tuple[str, str]]:
    """Return the runs without a stored row, each with the model and benchmark that determine its duration."""
    return {
        job.key: (job.spec.model.name, job.spec.benchmark.name)
        for job in jobs
        if job.spec.force or not Store(job.spec.store).run(job.key).finished
    }
