"""The runner of a command's cells: admitted jobs, one loaded model at a time, rows and failures.

Rows are printed as they come; at the end tables, failures, figures and JSON lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from espalier.harness.errors import Refused, StoreLost, UserError, print_lines
from espalier.harness.ranks import Ranks
from espalier.harness.runs import console, hints, streams, wandb_log
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.admission import Job, admit_here, check_drawn
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.progress_bar import Board, BoardCell
from espalier.harness.runs.single_run import CellRunner
from espalier.harness.runs.streams import StatusLine
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir, Store
from espalier.harness.store import sweep_files as sweeps
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.sweep_files import SweepCell


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
        jobs: the admitted jobs, each with its cell.
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
    jobs: list[tuple[RunSpec, Job]] = field(default_factory=list)
    note: Callable[[RunSpec, str, int], None] = lambda spec, reason, code: None
    cells: CellRunner = field(init=False)
    rows: list[dict[str, Any]] = field(default_factory=list, init=False)
    refused: list[tuple[RunSpec, str]] = field(default_factory=list, init=False)
    failures: list[tuple[RunSpec, str, int]] = field(default_factory=list, init=False)
    _by_spec: dict[int, Job | None] = field(default_factory=dict, init=False)
    _lines_by_spec: Mapping[int, Sequence[str]] = field(default_factory=dict, init=False)

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
        for number, spec in enumerate(specs, 1):
            self.waiting.say(f"checking cell {number} of {len(specs)}")
            try:
                job = admit_here(spec, self.ranks, self.digests)
                self.jobs.append((spec, job))
                self._by_spec[id(spec)] = job
            except Refused as error:
                if spec.refused == "error":
                    raise
                self._by_spec[id(spec)] = None
                self.refused.append((spec, str(error)))
                self.note(spec, str(error), 2)
        if not self.jobs:
            raise UserError(self.refused[0][1])
        jobs = [job for _, job in self.jobs]
        check_drawn(jobs)
        # Runs without a stored row, each with the model and benchmark that determine its duration.
        pending = {
            job.key: (job.spec.model.name, job.spec.benchmark.name)
            for job in jobs
            if job.spec.force or not Store(job.spec.store).run(job.key).finished
        }
        self.board.forecast.expect(len(specs), pending)
        self.board.expect([place_of(job) for job in jobs])
        self._lines_by_spec = dict(zip(map(id, specs), self.lines, strict=False))

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

    def job_of(self, spec: RunSpec) -> Job | None:
        """Return the job of a cell; None if it is refused. A cell that was not admitted before is admitted now."""
        if id(spec) not in self._by_spec:
            return admit_here(spec, self.ranks, self.digests)
        job = self._by_spec[id(spec)]
        if job is not None:
            self.ranks.use_device(spec.model.device)
        return job

    def run(self, spec: RunSpec) -> None:
        """Run one cell and report its row; a refused cell is skipped.

        Raises:
            SampleErrors: samples failed; the others are in the journal.
            BudgetMismatch: a sample kept another number of tokens than requested.
        """
        self.board.forecast.cell += 1
        job = self.job_of(spec)
        if job is not None:
            self.board.begin(place_of(job))
            row, seconds = self.cells.run(job, [other_job for _, other_job in self.jobs])
            self._take(row, job, seconds)

    def failed(self, spec: RunSpec, cause: str, code: int) -> None:
        """Note that a cell has no row.

        Args:
            spec: the cell.
            cause: the reason, in one line.
            code: the exit code of a command that fails for this reason.
        """
        self.failures.append((spec, cause, code))
        self.note(spec, cause, code)
        job = self.job_of(spec)
        if job is not None:
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
        if row is not None:
            self._take({**row, "status": row["status"] if fresh else "cached"}, job, 0.0)
        return row is not None

    def finish(self, spec: RunSpec) -> None:
        """Print the table of all rows, draw the files of `spec`, and end with the last row's JSON line.

        At a terminal the folders of the rows and the next command are printed instead. A sweep is compared in W&B.

        Raises:
            UserError: the rows are not enough for curves or a report.
            StoreLost: these cannot be written.
            OutputLost: standard output cannot be written.
        """
        if self.ranks.rank:
            return
        with streams.output():
            self._print()
        if self.rows:
            self._draw(spec)
        if self.cells.group is not None and spec.log == "wandb":
            wandb_log.compare(self.rows, spec, self.cells.group)

    def _take(self, row: dict[str, Any], job: Job, seconds: float) -> None:
        """Take a finished row; its JSON line is printed when the next row comes, or by `finish`."""
        self.board.finish(place_of(job), row)
        if row["status"] != "cached":
            self.board.forecast.computed(row["run_key"], seconds)
        if self.ranks.rank == 0:
            if self.rows and console.prints_json(job.spec, self.out):
                console.print_json(self.rows[-1], self.out)
            if self.sweep:
                progress.tell_finished(row, self.board.forecast, seconds)
        self.rows.append(row)

    def _draw(self, spec: RunSpec) -> None:
        """Draw the files of a cell, and end with the last row's JSON line or the next command and its purpose."""
        left_out = [*self.refused, *((cell, cause) for cell, cause, _ in self.failures)]
        cells = self.board.forecast.cells
        try:
            for path in console.write_figures(spec, self.rows, left_out, cells, self.waiting):
                self.waiting.clear()
                with streams.output():
                    print_lines(f"wrote {path}", file=self.out)
        except OSError as error:
            raise StoreLost(f"{error}; the rows are in the store") from error
        finally:
            self.waiting.clear()
            missing = cells - len(self.rows) - len(left_out)
            # The command that repeats failed cells is printed already.
            repeats = self.failures and not missing
            advice = None if repeats else hints.next_step(self.argv, self.rows, missing)
            console.print_end(spec, self.rows, advice, self.out)

    def _print(self) -> None:
        """Print the table of rows, the cells without a row and why, and the command that repeats failed cells."""
        if self.rows:
            console.print_rows(self.rows, self.out, full=not self.sweep)
        failed = [(spec, cause) for spec, cause, _ in self.failures]
        if self.rows or (failed and self.sweep):
            console.print_left("left out", self.refused, self.out)
            console.print_left("failed", failed, self.out)
        if failed and self.sweep:
            lines = (self._lines_by_spec.get(id(spec)) for spec, _ in failed)
            command = hints.rerun(self.argv, [line for line in lines if line is not None])
            print_lines(f"run what failed again: {command}", file=self.out)


def place_of(job: Job) -> BoardCell:
    """Return the position of a run on the board of its sweep."""
    method, budget = f"{job.spec.method.title} {job.label}".strip(), job.spec.budget
    return BoardCell(job.spec.benchmark.name, method, budget.ratio, budget.count)
