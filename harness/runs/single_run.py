"""One cell, from its key to its row: skip it if it is done, else claim it, evaluate it and store what came out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from espalier.harness.engine.artifacts.priors import prior_for
from espalier.harness.errors import tell_once
from espalier.harness.evaluation.task_cache import Shelf
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.ranks import Ranks
from espalier.harness.runs import environment, wandb_log
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.model_pool import Pool, threads
from espalier.harness.runs.onepass import OnePass, begin, journal_of
from espalier.harness.runs.preflight import Job
from espalier.harness.runs.result_row import build_row
from espalier.harness.runs.sweep_board import Board
from espalier.harness.store import RunDir, Store, Unreadable, failures
from espalier.harness.store.answer_digest import digest_of

if TYPE_CHECKING:
    from torch import nn

    from espalier.harness.cost.peak_memory import Peak
    from espalier.harness.evaluation.evaluate import Evaluation


@dataclass
class CellRunner:
    """Gives the row of one admitted job after the other; of several processes all take the same ones in turn.

    Args:
        ranks: the processes that share each run.
        argv: the command line, which is noted where a run fails.
        group: what the runs of a sweep are mirrored under; None outside one.
        pool: the loaded model.
        shelf: what opening a benchmark reads for all of its cells.
        board: how far the command is.
        passes: what cells have answered together.
        done: run keys of which this command has a row.
    """

    ranks: Ranks = field(default_factory=Ranks)
    argv: Sequence[str] = ()
    group: str | None = None
    pool: Pool = field(default_factory=Pool)
    shelf: Shelf = field(default_factory=Shelf)
    board: Board = field(default_factory=Board)
    passes: OnePass = field(default_factory=OnePass)
    done: set[str] = field(default_factory=set)

    def run(self, job: Job, jobs: Sequence[Job]) -> tuple[dict[str, Any], float]:
        """Return the row of a job, and the seconds that it took by itself.

        Args:
            job: what is to be done.
            jobs: all jobs of the command, some of which may be answered together with this one.

        Raises:
            SampleErrors: samples failed; the others are in the journal.
            BudgetMismatch: a sample kept another number of tokens than asked.
        """
        directory = Store(job.spec.store).run(job.key)
        row = self.stored(job, directory)
        if row is None:
            self.ranks.first(directory.check_writable)
            self._answer_together(job, jobs)
        start = time.monotonic()
        if row is None:
            noted = failures.noted(directory.path, self.argv, quiet=self.ranks.rank > 0)
            with self._claim(job, directory), noted:
                # Another command may have finished it meanwhile.
                row = self.stored(job, directory) or self._evaluate(job, directory)
        elif self.ranks.rank == 0:
            directory.tidy(job.spec.lease)
        if job.spec.log == "wandb" and self.ranks.rank == 0:
            # Also of a row that was there: a command may have been killed before its mirror was written.
            wandb_log.mirror(directory, job.parts, job.spec, self.group)
        self.done.add(job.key)
        return row, time.monotonic() - start

    def stored(self, job: Job, directory: RunDir) -> dict[str, Any] | None:
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

    def _accepts(self, job: Job, row: Mapping[str, Any]) -> bool:
        """Say whether a stored row stands, which one of this command always does.

        `force` asks for a new one; a row with more failed samples than are allowed is tried again, and one without
        the speed-up that `engine.paired` asks for goes on to measure it: its answers are in the journal.
        """
        if job.key in self.done:
            return True
        engine, extra = job.spec.engine, row["extra"]
        lacks = engine.paired not in (0, "auto") and extra.get("speedup") is None and _can_gain(job)
        return not (job.spec.force or lacks) and len(extra["failures"]) <= engine.max_errors

    def _answer_together(self, job: Job, jobs: Sequence[Job]) -> None:
        """Answer the samples of all cells left that may share a pass with this one, if that is asked."""
        if self.passes.due(job):
            places = ((one, Store(one.spec.store).run(one.key)) for one in jobs)
            left = [one for one, directory in places if self.stored(one, directory) is None]
            self.passes.ahead(job, left, self.pool, self.shelf, self.ranks, self.board)

    @contextlib.contextmanager
    def _claim(self, job: Job, directory: RunDir) -> Iterator[None]:
        """Wait, and say so, while another command computes the same run."""
        with contextlib.ExitStack() as held:

            def wait(patience: float) -> bool:
                return self.ranks.first(
                    lambda: held.enter_context(directory.claim(patience, job.spec.lease))
                )

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
        from espalier.harness.cost.peak_memory import peak_memory
        from espalier.harness.evaluation.evaluate import evaluate, open_benchmark

        spec, ranks = job.spec, self.ranks
        status = ranks.first(lambda: self._begin(job, directory))
        journal = journal_of(job, directory).of_rank(ranks.rank)
        title = f"{spec.method.title} {spec.budget.ratio:g} {spec.benchmark.name}"
        with (
            threads(spec.engine.threads),
            contextlib.redirect_stdout(sys.stderr),
            progress.shown(title, self.board, job.key, quiet=ranks.rank > 0) as shown,
        ):
            shown.phase(f"opening {spec.benchmark.name}")
            loaded = open_benchmark(spec, ranks, self.shelf)
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
            return ranks.first(
                lambda: self._store(job, directory, evaluation, peak, status, adapter.model)
            )

    def _begin(self, job: Job, directory: RunDir) -> str:
        """Prepare the directory of a run and return its status to be; answers of this command are no older ones."""
        there = begin(job, directory)
        shared = job.key in self.passes.fresh and job.key not in self.passes.resumed
        return "resumed" if there and not shared else "done"

    def _store(
        self,
        job: Job,
        directory: RunDir,
        evaluation: Evaluation,
        peak: Peak,
        status: str,
        model: nn.Module,
    ) -> dict[str, Any]:
        """Build the row of a finished run and commit it."""
        spec, world = job.spec, self.ranks.world
        # Times of rows compare only where all of this is equal.
        how = {
            **environment.placement(model),
            "batch_size": evaluation.batch_size,
            "processes": world,
            "prefetch": evaluation.ahead,
        }
        row = build_row(job, evaluation, peak, environment.describe(spec) | how, status)
        row["extra"]["batch_size"] = evaluation.batch_size
        answers = {sample.key: sample.answer for sample in evaluation.samples}
        row["extra"]["answers"] = digest_of(answers)
        row["extra"]["resumed_samples"] -= self.passes.fresh.get(job.key, 0)
        if world > 1:
            row["extra"]["peak_note"] += f"; the largest of {world} processes"
        directory.commit(row, forced=spec.force)
        return row


def _can_gain(job: Job) -> bool:
    """Say whether the run has something to gain on the unreduced model."""
    composed = job.spec.benchmark.prompt_tokens is not None  # such a row has both sides in any case
    return not composed and kind_of(job.method).unpaired(job.spec, job.method) is None
