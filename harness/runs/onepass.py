"""One-pass sweeps (`engine.share=prefix`): before the first of several cells that may share runs, all are answered.

A pass fills journals and nothing else. Each cell is then carried out as ever, which scores what is there and commits
its row, so that rows are those of cells that ran one after the other, but for times.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from espalier.harness.engine.artifacts.priors import prior_for
from espalier.harness.errors import tell_once
from espalier.harness.evaluation.task_cache import Shelf
from espalier.harness.kinds.one_pass import apart, frame
from espalier.harness.ranks import Ranks
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.model_pool import Pool, threads
from espalier.harness.runs.preflight import Job
from espalier.harness.runs.sweep_board import Board
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir, Store
from espalier.harness.store.files.journal import Journal


@dataclass
class OnePass:
    """The shared passes of one command.

    Attributes:
        made: what the cells of each pass have in common.
        fresh: by run key, how many answers a pass of this command gave.
        resumed: run keys that had answers before.
    """

    made: list[RunSpec] = field(default_factory=list)
    fresh: dict[str, int] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)

    def due(self, job: Job) -> bool:
        """Say whether a pass is asked for that this command has not made yet."""
        return job.spec.engine.share == "prefix" and frame(job.spec) not in self.made

    def ahead(
        self, job: Job, jobs: Sequence[Job], pool: Pool, shelf: Shelf, ranks: Ranks, board: Board
    ) -> None:
        """Answer the samples of a cell whose pass is due and of all that may share it.

        Args:
            job: the cell that is about to run.
            jobs: all cells that are to be computed, this one among them.
            pool: the loaded model.
            shelf: what opening the benchmark has read.
            ranks: the processes of the command; all call this together.
            board: how far the sweep is.
        """
        common = frame(job.spec)
        self.made.append(common)
        alike = {one.key: one for one in jobs if frame(one.spec) == common}
        alone = {key: apart(one.spec, one.method) for key, one in alike.items()}
        together = [one for key, one in alike.items() if alone[key] is None]
        if ranks.rank == 0:
            _tell(job, [one for one in alike.values() if alone[one.key]], alone, len(together))
        with contextlib.ExitStack() as held:
            free = [one for one in together if _claim(one, held, ranks)]
            if len(free) > 1:
                self._run(free, pool, shelf, ranks, board)

    def _run(
        self, jobs: Sequence[Job], pool: Pool, shelf: Shelf, ranks: Ranks, board: Board
    ) -> None:
        # Both bring in what takes seconds to import.
        from espalier.harness.evaluation.evaluate import open_benchmark
        from espalier.harness.evaluation.shared_pass import Sharer, answer_together

        spec = jobs[0].spec
        directories = [Store(one.spec.store).run(one.key) for one in jobs]
        begun = ranks.first(lambda: [begin(*pair) for pair in zip(jobs, directories, strict=True)])
        self.resumed |= {one.key for one, there in zip(jobs, begun, strict=True) if there}
        title = f"{len(jobs)} cells {spec.benchmark.name}"
        with (
            threads(spec.engine.threads),
            contextlib.redirect_stdout(sys.stderr),
            progress.shown(title, board, jobs[0].key, quiet=ranks.rank > 0) as shown,
        ):
            shown.phase(f"opening {spec.benchmark.name}")
            loaded = open_benchmark(spec, ranks, shelf)
            shown.phase(f"loading {spec.model.name}")
            adapter = pool.adapter(spec.model)
            sharers = [
                Sharer(
                    one.spec,
                    one.method,
                    journal_of(one, directory).of_rank(ranks.rank),
                    prior_for(one.spec.model, one.method, one.spec.store),
                )
                for one, directory in zip(jobs, directories, strict=True)
            ]
            shown.phase(title)
            answer_together(sharers, adapter, loaded, shown.samples, ranks)
        given = ranks.gather([one.fresh for one in sharers])
        for job, counts in zip(jobs, zip(*given, strict=True), strict=True):
            self.fresh[job.key] = sum(counts)


def begin(job: Job, directory: RunDir) -> bool:
    """Prepare the directory of a run; return whether it has answers already."""
    directory.describe(job.parts)
    return bool(len(journal_of(job, directory)))


def journal_of(job: Job, directory: RunDir) -> Journal:
    """Return where the answers go: a forced run's beside those of the row that stands until the run is finished."""
    return directory.forced if job.spec.force else directory.journal


def _claim(job: Job, held: contextlib.ExitStack, ranks: Ranks) -> bool:
    """Hold a run for the length of the pass; one that another command computes is left to it."""
    directory = Store(job.spec.store).run(job.key)
    return ranks.first(lambda: held.enter_context(directory.claim(0.0, job.spec.lease)))


def _tell(job: Job, left: Sequence[Job], alone: dict[str, str | None], count: int) -> None:
    """Say in one line which cells share a pass and which do not."""
    reasons: dict[str, list[str]] = {}
    for one in left:
        reasons.setdefault(alone[one.key] or "", []).append(
            f"{one.spec.method.title} {one.spec.budget.ratio:g}"
        )
    apart = "".join(f"; by itself: {', '.join(cells)} ({why})" for why, cells in reasons.items())
    where = f"{job.spec.model.name} on {job.spec.benchmark.name}"
    shared = (
        f"{count} cells of {where} in one pass" if count > 1 else f"nothing to share of {where}"
    )
    tell_once(f"engine.share=prefix: {shared}{apart}")
