"""What run.py needs around one run: checked jobs, one loaded model at a time, stored rows, a quiet stdout."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from harness.artifacts.priors import prior_for
from harness.digests import Digests
from harness.errors import Refused, StoreLost, UserError, tell_once
from harness.journal import Journal
from harness.kinds.lookup import kind_of
from harness.ranks import Ranks
from harness.running import console, environment, printing, progress, streams, wandb_log
from harness.running.checking import check_cell, check_drawn
from harness.running.forecast import Forecast
from harness.running.pool import Pool, threads
from harness.running.preflight import Job
from harness.running.row import build_row
from harness.running.waiting import Waiting
from harness.specs import RunSpec
from harness.store import RunDir, Store, Unreadable

if TYPE_CHECKING:
    from harness.evaluation.evaluate import Evaluation
    from harness.measure.memory import Peak


@dataclass
class Runner:
    """Runs checked jobs one after the other and reports their rows.

    Of several processes all run all jobs, in the same order; only the first stores, logs and prints.

    Args:
        sweep: whether rows are printed as one table instead of one sheet.
        ranks: the processes that share each run.
        argv: the checked command line, for what is printed about it.
        waiting: the line that says what goes on where nothing else does.
        out: where tables and JSON lines go.
        pool: the loaded model.
        digests: hashes of files read so far.
        rows: what has finished.
        left_out: what has no row, each with the reason in one line.
        refused: how many of these were left out before the first cell ran.
        forecast: how many cells there are, and how far they are.
        jobs: what was admitted, each with the cell that it was made of.
    """

    sweep: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    argv: Sequence[str] = ()
    waiting: Waiting = field(default_factory=lambda: Waiting(quiet=True))
    out: TextIO = field(default_factory=lambda: sys.stdout)
    pool: Pool = field(default_factory=Pool)
    digests: Digests = field(default_factory=Digests)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[tuple[RunSpec, str]] = field(default_factory=list)
    refused: int = 0
    forecast: Forecast = field(default_factory=Forecast)
    jobs: list[tuple[RunSpec, Job]] = field(default_factory=list)

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
                self.left_out.append((spec, str(error)))
        if len(self.left_out) == len(specs):
            raise UserError(self.left_out[0][1])
        self.refused = len(self.left_out)
        jobs = [job for _, job in self.jobs]
        check_drawn(jobs)
        self.forecast.expect(len(specs), _pending(jobs))

    def run(self, spec: RunSpec) -> None:
        """Run one cell: key -> skip if done -> evaluate -> store -> report. Nothing happens to a cell left out.

        Raises:
            SampleErrors: samples failed; the others are in the journal.
            BudgetMismatch: a sample kept another number of tokens than asked.
        """
        self.forecast.cell += 1
        if any(spec == one for one, _ in self.left_out):
            return
        start = time.monotonic()
        job = self._job(spec)
        directory = Store(spec.store).run(job.key)
        row = self._stored(job, directory)
        if row is None:
            with self._claim(directory):
                # Another command may have finished it meanwhile.
                row = self._stored(job, directory) or self._evaluate(job, directory)
        self._report(row, spec, time.monotonic() - start)

    def _job(self, spec: RunSpec) -> Job:
        """Return the job that a cell was admitted as; one that nobody asked to admit is checked now."""
        found = next((job for one, job in self.jobs if one == spec), None)
        if found is None:
            return check_cell(spec, self.ranks, self.digests)
        self.ranks.use_device(spec.model.device)
        return found

    def _stored(self, job: Job, directory: RunDir) -> dict[str, Any] | None:
        """Return the row that the store has of a job; None if the job is to be run.

        Raises:
            UserError: what stands in the row's place is damaged, or the row of another run, and nothing is forced.
        """

        def read() -> dict[str, Any] | None:
            try:
                return directory.row(whole=True)
            except Unreadable:
                if not job.spec.force:
                    raise
                return None

        row = self.ranks.first(read)
        return None if row is None or not self._accepts(job, row) else row | {"status": "cached"}

    @contextlib.contextmanager
    def _claim(self, directory: RunDir) -> Iterator[None]:
        """Wait, and say so, while another command computes the same run."""
        with contextlib.ExitStack() as held:

            def wait(patience: float) -> bool:
                return self.ranks.first(lambda: held.enter_context(directory.claim(patience)))

            if not wait(0.0):
                if self.ranks.rank == 0:
                    tell_once(f"waiting: another command computes run {directory.path}")
                # In turns of a minute: no process of this command may wait for another as long as for a row.
                while not wait(60.0):
                    pass
            yield

    def _evaluate(self, job: Job, directory: RunDir) -> dict[str, Any]:
        """Run a job, or the rest of it, and return its committed row."""
        # Looked up where they are defined, at each run: the tests of a run put stand-ins there.
        from harness.evaluation.evaluate import evaluate, open_benchmark
        from harness.measure.memory import peak_memory

        spec, ranks = job.spec, self.ranks
        status = ranks.first(lambda: _begin(job, directory))
        journal = _journal(job, directory).of_rank(ranks.rank)
        title = f"{spec.method.title} {spec.budget.ratio:g} {spec.benchmark.name}"
        with (
            threads(spec.engine.threads),
            contextlib.redirect_stdout(sys.stderr),
            progress.shown(title, self.forecast, job.key, quiet=ranks.rank > 0) as shown,
        ):
            shown.phase(f"opening {spec.benchmark.name}")
            loaded = open_benchmark(spec, ranks)
            prior = prior_for(spec.model, job.method, spec.store)
            shown.phase(f"loading {spec.model.name}")
            adapter = self.pool.adapter(spec.model)
            shown.phase(title)
            with peak_memory(*adapter.devices) as own:
                evaluation = evaluate(
                    spec,
                    adapter,
                    job.method,
                    journal,
                    shown.samples,
                    prior=prior,
                    ranks=ranks,
                    answered=own.stop,
                    loaded=loaded,
                )
            peak = max(ranks.gather(own), key=lambda one: one.bytes)
            return ranks.first(lambda: self._store(job, directory, evaluation, peak, status))

    def _store(
        self, job: Job, directory: RunDir, evaluation: Evaluation, peak: Peak, status: str
    ) -> dict[str, Any]:
        """Build the row of a finished run, commit it and mirror it in the configured log."""
        spec, world = job.spec, self.ranks.world
        # Times of rows compare only where all of this is equal.
        how = {"batch_size": evaluation.batch_size, "processes": world}
        row = build_row(job, evaluation, peak, environment.describe(spec) | how, status)
        row["extra"]["batch_size"] = evaluation.batch_size
        if world > 1:
            row["extra"]["peak_note"] += f"; the largest of {world} processes"
        directory.commit(row, forced=spec.force)
        if spec.log == "wandb":
            wandb_log.mirror(row, job.parts, spec.store, spec.log_options)
        return row

    def _accepts(self, job: Job, row: Mapping[str, Any]) -> bool:
        """Say whether a stored row stands, which one of this sweep always does.

        `force` asks for a new one; a row with more failed samples than are allowed is tried again, and one without
        the speed-up that `engine.paired` asks for goes on to measure it: its answers are in the journal.
        """
        if any(done["run_key"] == row["run_key"] for done in self.rows):
            return True
        engine, extra = job.spec.engine, row["extra"]
        lacks = engine.paired > 0 and extra.get("speedup") is None and _can_gain(job)
        return not (job.spec.force or lacks) and len(extra["failures"]) <= engine.max_errors

    def _report(self, row: dict[str, Any], spec: RunSpec, seconds: float) -> None:
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
        if not self.rows or self.ranks.rank:
            return
        with streams.output():
            console.print_rows(self.rows, self.out, full=not self.sweep)
            for reason, cells in printing.reasons(self.left_out).items():
                print(f"left out: {', '.join(cells)}: {reason}", file=self.out, flush=True)
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
                missing = self.forecast.cells - len(self.rows) - self.refused
                printing.print_advice(spec, self.argv, self.rows, missing, self.out)


def _pending(jobs: Sequence[Job]) -> dict[str, tuple[str, str]]:
    """Return the runs that the store has no row of, each with what it lasts as long as: its model and benchmark."""
    return {
        job.key: (job.spec.model.name, job.spec.benchmark.name)
        for job in jobs
        if job.spec.force or not Store(job.spec.store).run(job.key).finished
    }


def _can_gain(job: Job) -> bool:
    """Say whether the run has something to gain on the unreduced model."""
    return kind_of(job.method).unpaired(job.spec, job.method) is None


def _begin(job: Job, directory: RunDir) -> str:
    """Prepare the directory of a run and return its status to be."""
    directory.describe(job.parts)
    return "resumed" if len(_journal(job, directory)) else "done"


def _journal(job: Job, directory: RunDir) -> Journal:
    """Return where the answers go: a forced run's beside those of the row that stands until the run is finished."""
    return directory.forced if job.spec.force else directory.journal
