"""What run.py needs around the cells of a command: checked jobs, one loaded model at a time, rows, a quiet stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from espalier.harness.errors import Refused, UserError
from espalier.harness.ranks import Ranks
from espalier.harness.runs import wandb_log
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.outcome import Outcome
from espalier.harness.runs.preflight import Job
from espalier.harness.runs.process_checks import check_cell, check_drawn
from espalier.harness.runs.result_row import outline
from espalier.harness.runs.single_run import CellRunner
from espalier.harness.runs.status_line import Waiting
from espalier.harness.runs.sweep_board import Board, Place
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir, Store
from espalier.harness.store import sweep_files as sweeps
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.sweep_files import Cell


@dataclass
class Runner:
    """Runs checked jobs one after the other and reports their rows.

    Of several processes all run all jobs, in the same order; only the first stores, logs and prints.

    Args:
        sweep: whether rows are printed as one table instead of one sheet.
        ranks: the processes that share each run.
        argv: the checked command line, for what is printed about it.
        waiting: the line that says what goes on where nothing else does.
        lines: the overrides of each cell, in the order of the cells; none where they are not known.
        out: where tables and JSON lines go.
        pool: the loaded model.
        digests: hashes of files read so far.
        board: how many cells there are, how far they are, and what became of them.
        jobs: what was admitted, each with the cell that it was made of.

    Attributes:
        cells: gives the row of one job.
        outcome: what came of the cells so far.
    """

    sweep: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    argv: Sequence[str] = ()
    waiting: Waiting = field(default_factory=lambda: Waiting(quiet=True))
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
        """Make what runs one cell, and what tells of all."""
        group = wandb_log.group_of(self.argv) if self.sweep else None
        self.cells = CellRunner(self.ranks, self.argv, group, self.pool, board=self.board)
        self.outcome = Outcome(
            self.sweep, self.ranks, self.argv, self.waiting, self.out, self.board.forecast
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What has finished."""
        return self.outcome.rows

    def admit(self, specs: Sequence[RunSpec]) -> None:
        """Check all cells before the first one runs; with `refused=skip`, note those that cannot run.

        Raises:
            UserError: a cell is wrong, or cannot run and `refused=error`, or not one can run; or curves or a report are
                asked for and the rows could not stand beside each other.
        """
        for number, spec in enumerate(specs, 1):
            self.waiting.say(f"checking cell {number} of {len(specs)}")
            try:
                self.jobs.append((spec, check_cell(spec, self.ranks, self.digests)))
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
        """Leave a list of the cells that were admitted in the store, for `python -m espalier sweep status`.

        Args:
            specs: the cells of the command, as they were given to `admit`.
        """
        if self.ranks.rank == 0:
            # Of a preset's grids no cell has a line of its own: the sweep itself runs what is left.
            whole = tuple(text for text in self.argv if not text.startswith("-"))
            lines = self.lines or [whole] * len(specs)
            admitted = {id(spec): job for spec, job in self.jobs}
            cells = [
                Cell.of(job.key, outline(job), line)
                for job, line in zip(map(admitted.get, map(id, specs)), lines, strict=True)
                if job is not None
            ]
            sweeps.announce(specs[0].store, self.argv, cells)

    def run(self, spec: RunSpec) -> None:
        """Run one cell and report its row. Nothing happens to a cell left out.

        Raises:
            SampleErrors: samples failed; the others are in the journal.
            BudgetMismatch: a sample kept another number of tokens than asked.
        """
        self.board.forecast.cell += 1
        if id(spec) in self._refused:
            return
        job = self._job(spec)
        self.board.begin(place_of(job))
        row, seconds = self.cells.run(job, [one for _, one in self.jobs])
        self.board.finish(place_of(job), row)
        self.outcome.take(row, spec, seconds)

    def failed(self, spec: RunSpec, cause: str, code: int) -> None:
        """Note that a cell came to no row.

        Args:
            spec: the cell.
            cause: why, in one line.
            code: the exit code that a command has for it.
        """
        self.outcome.fail(spec, cause, code)
        job = self._job(spec)
        self.board.fail(place_of(job), cause)
        # No time is left for it any more.
        self.board.forecast.pending.pop(job.key, None)

    def stored(self, job: Job) -> dict[str, Any] | None:
        """Return the row that the store has of an admitted job; None if the job is to be run.

        Raises:
            UserError: what stands in the row's place is damaged, or the row of another run, and nothing is forced.
        """
        # Its folder is not made here: whoever only asks writes nothing.
        return self.cells.stored(job, RunDir(job.spec.store / "runs" / job.key))

    def collect(self, job: Job, fresh: bool) -> bool:
        """Take and report the row that another process has stored of a job; False if there is none.

        Args:
            job: an admitted job.
            fresh: whether the row was made for this command.
        """
        row = Store(job.spec.store).run(job.key).row(whole=True)
        if row is None:
            return False
        self.board.finish(place_of(job), row)
        status = row["status"] if fresh else "cached"
        self.outcome.take({**row, "status": status}, job.spec, 0.0)
        return True

    def finish(self, spec: RunSpec) -> None:
        """Tell what came of the cells, and draw what `spec` asks for; see `Outcome.finish`."""
        self.outcome.finish(spec)

    def _job(self, spec: RunSpec) -> Job:
        """Return the job that a cell was admitted as; one that nobody asked to admit is checked now."""
        found = self._admitted.get(id(spec))
        if found is None:
            return check_cell(spec, self.ranks, self.digests)
        self.ranks.use_device(spec.model.device)
        return found


def place_of(job: Job) -> Place:
    """Return where a run stands on the board of its sweep."""
    method = f"{job.spec.method.title} {job.label}".strip()
    return Place(job.spec.benchmark.name, method, job.spec.budget.ratio)


def _pending(jobs: Sequence[Job]) -> dict[str, tuple[str, str]]:
    """Return the runs that the store has no row of, each with what it lasts as long as: its model and benchmark."""
    return {
        job.key: (job.spec.model.name, job.spec.benchmark.name)
        for job in jobs
        if job.spec.force or not Store(job.spec.store).run(job.key).finished
    }
