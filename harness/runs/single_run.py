"""One cell, from its key to its row: skip it if it is done, else claim it, evaluate it and store the row."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.memory import Peak
from espalier.harness.engine.priors import prior_for
from espalier.harness.errors import UserError, plain, tell_once
from espalier.harness.evaluation.evaluate import Evaluation
from espalier.harness.evaluation.samples import SampleErrors
from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.ranks import Ranks
from espalier.harness.runs import environment, wandb_log
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.admission import Job
from espalier.harness.runs.model_pool import Pool, threads
from espalier.harness.runs.onepass import OnePass, begin, journal_of
from espalier.harness.runs.progress_bar import Board
from espalier.harness.runs.result_row import build_row
from espalier.harness.runs.served.engine_pool import EnginePool
from espalier.harness.runs.wandb_log import Mirror
from espalier.harness.specs.commands import collect_again
from espalier.harness.specs.comparable import settings_digest
from espalier.harness.store import RunDir, Store, Unreadable
from espalier.harness.store.answer_digest import digest_of
from espalier.harness.store.claims import tidy
from espalier.harness.store.files.digests import digest

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter


@dataclass
class CellRunner:
    """Computes the rows of admitted jobs; all processes of a launch take the same jobs in the same order.

    Args:
        ranks: the processes that share each run.
        argv: the command line, noted with failures.
        group: the group of a sweep in W&B; None outside a sweep.
        pool: the loaded model.
        engines: the engine of another program that answers in its place; None before the first such run.
        shelf: the data of an open benchmark, for all of its cells.
        board: the progress of the command.
        passes: the shared passes of cells.
        done: run keys that have a row of this command.
        earlier: runs with a row by store, and by cell and settings: key, and `extra` of the row.
    """

    ranks: Ranks = field(default_factory=Ranks)
    argv: Sequence[str] = ()
    group: str | None = None
    pool: Pool = field(default_factory=Pool)
    engines: EnginePool | None = None
    shelf: TaskCache = field(default_factory=TaskCache)
    board: Board = field(default_factory=Board)
    passes: OnePass = field(default_factory=OnePass)
    done: set[str] = field(default_factory=set)
    earlier: dict[Path, dict[str, tuple[str, Mapping[str, Any]]]] = field(default_factory=dict)

    def run(self, job: Job, jobs: Sequence[Job]) -> tuple[dict[str, Any], float]:
        """Return the row of a job, and the seconds that it took by itself.

        Args:
            job: the job.
            jobs: all jobs of the command; some may share a pass with this one.

        Raises:
            SampleErrors: samples failed; the others are in the journal.
            BudgetMismatch: a sample kept another number of tokens than requested.
        """
        directory = Store(job.spec.store).run(job.key)
        row = self.stored(job)
        if row is None:
            if self.ranks.rank == 0:
                self._report_other_code(job)
            self.ranks.first(directory.check_writable)
            self._answer_together(job, jobs)
        start = time.monotonic()
        # Stored rows are mirrored too: a command may have been killed before it logged its row.
        mirrored: contextlib.AbstractContextManager[Mirror | None] = contextlib.nullcontext()
        if job.spec.log == "wandb" and self.ranks.rank == 0:
            mirrored = wandb_log.mirrored(directory, job.parts, job.label, job.spec, self.group)
        with mirrored as mirror:
            if row is None:
                noted = directory.failure_recorded(self.argv, quiet=self.ranks.rank > 0)
                with self._claim(job, directory), noted:
                    # Another command may have finished it in the meantime.
                    row = self.stored(job) or self._evaluate(job, directory, mirror)
            elif self.ranks.rank == 0:
                tidy(directory.path, job.spec.lease)
        self.done.add(job.key)
        return row, time.monotonic() - start

    def stored(self, job: Job) -> dict[str, Any] | None:
        """Return the stored row of a job; None if the job must run.

        Raises:
            UserError: the stored row is damaged or belongs to another run, and `force` is not set.
        """

        def read() -> dict[str, Any] | None:
            try:
                # The folder is not created here, since this only reads.
                return RunDir(job.spec.store / "runs" / job.key).row(complete=True)
            except Unreadable:
                if not job.spec.force:
                    raise
                return None

        row = self.ranks.first(read)
        return None if row is None or not self._accepts(job, row) else row | {"status": "cached"}

    def _accepts(self, job: Job, row: Mapping[str, Any]) -> bool:
        """Return whether a stored row is used, as a row of this command always is.

        `force` requests a new one; a row with more failed samples than allowed is computed again, and a row without the
        speed-up of `engine.paired` is completed from the answers in the journal.
        """
        if job.key in self.done:
            return True
        engine, extra, kind = job.spec.engine, row["extra"], kind_of(job.method, job.spec)
        lacks = (
            engine.paired not in (0, "auto")
            and extra.get("speedup") is None
            # A row of composed prompts always has both sides.
            and job.spec.benchmark.prompt_tokens is None
            and kind.why_no_paired_timing(job.spec, job.method) is None
        )
        return not (job.spec.force or lacks) and len(extra["failures"]) <= engine.max_errors

    def _report_other_code(self, job: Job) -> None:
        """Print a line if the store has a row of the same cell and settings, made by other code.

        Cost: for the first missing row of a command one read of each row of the store.
        """
        store = Store(job.spec.store)
        if store.root not in self.earlier:
            rows = self.earlier[store.root] = {}
            for directory in store.folders():
                with contextlib.suppress(UserError):
                    row = directory.row()
                    if row is not None and "settings" in row:
                        rows[_cell(row, row["settings"])] = directory.path.name, row["extra"]
        key, extra = self.earlier[store.root].get(
            _cell(job.parts["cell"], job.parts["settings"]), (job.key, {})
        )
        if key != job.key:
            commit = extra.get("environment", {}).get("commit")
            tell_once(
                f"run {key} has these settings, but is of other code or packages (commit {commit}), or of an earlier "
                "version of the run key: computed anew"
            )

    def _answer_together(self, job: Job, jobs: Sequence[Job]) -> None:
        """Answer the samples of all remaining cells that may share a pass with this one, if that is requested."""
        if self.passes.due(job):
            waiting = [cell for cell in jobs if self.stored(cell) is None]
            self.passes.ahead(job, waiting, self.pool, self.shelf, self.ranks, self.board)

    @contextlib.contextmanager
    def _claim(self, job: Job, directory: RunDir) -> Iterator[None]:
        """Claim the run; wait, and print so, while another command computes it."""
        with contextlib.ExitStack() as claims:

            def wait(patience: float) -> bool:
                return self.ranks.first(
                    lambda: claims.enter_context(directory.claim(patience, job.spec.lease))
                )

            if not wait(0.0):
                if self.ranks.rank == 0:
                    tell_once(f"waiting: another command computes run {directory.path}")
                # One minute at a time: processes of this command must not wait for each other as long as a row takes.
                while not wait(60.0):
                    pass
            yield

    def _evaluate(self, job: Job, directory: RunDir, mirror: Mirror | None) -> dict[str, Any]:
        """Run a job, or its remaining samples, and return its committed row."""
        # Imported at each run, since tests of runs replace them in their modules.
        from espalier.harness.cost.memory import peak_memory
        from espalier.harness.evaluation.evaluate import evaluate, open_benchmark
        from espalier.harness.evaluation.stated_answers import RunningScore

        spec, ranks = job.spec, self.ranks
        status = ranks.first(lambda: self._begin(job, directory))
        journal = journal_of(job, directory).of_rank(ranks.rank)
        title = f"{spec.method.title} {spec.budget.amount} {spec.benchmark.name}"
        with (
            threads(spec.engine.threads),
            contextlib.redirect_stdout(sys.stderr),
            progress.cell_progress(title, self.board, job.key, quiet=ranks.rank > 0) as bar,
        ):
            bar.phase(f"opening {spec.benchmark.name}")
            loaded = open_benchmark(spec, ranks, self.shelf)
            running = None
            if mirror is not None:
                running = RunningScore(loaded.tasks, spec.benchmark)
                mirror.begin(running)
            prior = prior_for(spec.model, job.method, spec.store)
            bar.phase(f"loading {spec.model.name}")
            served = None
            if spec.backend.served:
                self.engines = self.engines or EnginePool()
                served = self.engines.model(spec)
            adapter = self.pool.adapter(spec.model) if served is None else served.adapter
            bar.phase(title)
            collect_again()

            def report(finished: int, total: int) -> None:
                bar.samples(finished, total)
                if mirror is not None:
                    mirror.progress(finished, total)

            with peak_memory(*adapter.devices) as memory:
                evaluation = evaluate(
                    spec,
                    adapter,
                    job.method,
                    journal,
                    report,
                    prior=prior,
                    ranks=ranks,
                    answered=memory.stop,
                    loaded=loaded,
                    running=running,
                    served=None if served is None else served.open(spec, job.method),
                )
            peak = max(ranks.gather(memory), key=lambda peak: peak.bytes)
            row = ranks.first(
                lambda: self._store(
                    job,
                    directory,
                    evaluation,
                    peak,
                    status,
                    environment.placement(adapter.model) if served is None else served.placement,
                )
            )
            if mirror is not None and spec.log_pictures and spec.benchmark.prompt_tokens is None:
                self._draw(job, adapter, evaluation, mirror)
            return row

    def _draw(self, job: Job, adapter: Adapter, evaluation: Evaluation, mirror: Mirror) -> None:
        """Draw the samples without full marks for W&B, `log.pictures` of them, the worst first."""
        # It loads matplotlib.
        from espalier.harness.runs.sample_pictures import draw_samples, worst_samples

        try:
            worst = worst_samples(evaluation, job.spec.benchmark)[: job.spec.log_pictures]
            pictures = draw_samples(job.spec, job.method, adapter, worst, self.shelf)
            mirror.pictures = sorted(pictures, key=lambda picture: worst.index(picture.key))
        except (UserError, SampleErrors) as error:
            print(f"log=wandb: no pictures of run {job.key}: {plain(str(error))}", file=sys.stderr)

    def _begin(self, job: Job, directory: RunDir) -> str:
        """Prepare the directory of a run and return the status of its row; a shared pass is not a resume."""
        has_answers = begin(job, directory)
        shared = job.key in self.passes.fresh and job.key not in self.passes.resumed
        return "resumed" if has_answers and not shared else "done"

    def _store(
        self,
        job: Job,
        directory: RunDir,
        evaluation: Evaluation,
        peak: Peak,
        status: str,
        placement: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Build the row of a finished run and commit it."""
        spec, world = job.spec, self.ranks.world
        # Times of rows are comparable only where all of this is equal.
        how = {
            "batch_size": evaluation.batch_size,
            "processes": world,
            "prefetch": evaluation.ahead,
        }
        surroundings = {**environment.describe(spec), **placement, **how}
        row = build_row(job, evaluation, peak, surroundings, status)
        row["extra"]["batch_size"] = evaluation.batch_size
        row["extra"]["answers"] = digest_of(
            {sample.key: sample.answer for sample in evaluation.samples}
        )
        row["extra"]["resumed_samples"] -= self.passes.fresh.get(job.key, 0)
        if world > 1:
            row["extra"]["peak_note"] += f"; the largest of {world} processes"
        directory.commit(row, forced=spec.force)
        if clipped := row["extra"].get("clipped"):
            tell_once(
                f"keep={spec.budget.count}: {clipped} of {row['n_samples']} samples have fewer visual tokens, and keep "
                "all of them"
            )
        return row


def _cell(names: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return one digest of a cell and its settings."""
    amount = "keep" if names.get("keep") is not None else "ratio"
    cell = ("model", "method", "variant", "benchmark", "budget_rule", "seed", amount)
    return digest([[names.get(name) for name in cell], settings_digest(settings)])
