"""One-pass sweeps (`engine.share=prefix`): before the first of several cells that may share a pass, all are answered.

Cells share it up to the layer where they diverge. A pass only fills journals. Each cell then runs as usual, scores the
answers of its journal and commits its row, so that rows are equal to those of cells that ran one after the other,
except for times.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from espalier.harness.engine.priors import prior_for
from espalier.harness.errors import tell_once
from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.reducer import WHOLE
from espalier.harness.ranks import Ranks
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.admission import Job
from espalier.harness.runs.model_pool import Pool, threads
from espalier.harness.runs.progress_bar import Board
from espalier.harness.specs.commands import collect_again
from espalier.harness.specs.comparable import grouped
from espalier.harness.specs.run_spec import MethodSpec, RunSpec
from espalier.harness.store import RunDir, Store
from espalier.harness.store.files.journal import Journal
from espalier.methods.base import Method


@dataclass
class OnePass:
    """The shared passes of one command.

    Attributes:
        passes: the common part of the specs of each pass.
        fresh: answers of a pass of this command, by run key.
        resumed: run keys that had answers before.
    """

    passes: list[RunSpec] = field(default_factory=list)
    fresh: dict[str, int] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)

    def due(self, job: Job) -> bool:
        """Return whether a pass is requested that this command has not made yet."""
        return job.spec.engine.share == "prefix" and frame(job.spec) not in self.passes

    def ahead(
        self,
        job: Job,
        jobs: Sequence[Job],
        pool: Pool,
        shelf: TaskCache,
        ranks: Ranks,
        board: Board,
    ) -> None:
        """Answer the samples of a cell that has a pass due, and of all cells that may share it.

        Args:
            job: the cell that is about to run.
            jobs: all cells to compute, this one included.
            pool: the loaded model.
            shelf: the data of the open benchmark.
            ranks: the processes of the command; all call this together.
            board: the progress of the sweep.
        """
        common = frame(job.spec)
        self.passes.append(common)
        alike = {cell.key: cell for cell in jobs if frame(cell.spec) == common}
        reasons = {key: why_not_shared(cell.spec, cell.method) for key, cell in alike.items()}
        together = [cell for key, cell in alike.items() if reasons[key] is None]
        if ranks.rank == 0:
            _tell(
                job, [cell for cell in alike.values() if reasons[cell.key]], reasons, len(together)
            )
        with contextlib.ExitStack() as claims:
            free = [cell for cell in together if _claim(cell, claims, ranks)]
            if len(free) > 1:
                self._run(free, pool, shelf, ranks, board)

    def _run(
        self, jobs: Sequence[Job], pool: Pool, shelf: TaskCache, ranks: Ranks, board: Board
    ) -> None:
        # Both take seconds to import.
        from espalier.harness.evaluation.evaluate import open_benchmark
        from espalier.harness.evaluation.shared_pass import SharedRun, answer_together

        spec = jobs[0].spec
        directories = [Store(cell.spec.store).run(cell.key) for cell in jobs]
        begun = ranks.first(lambda: [begin(*pair) for pair in zip(jobs, directories, strict=True)])
        self.resumed |= {
            cell.key for cell, has_answers in zip(jobs, begun, strict=True) if has_answers
        }
        title = f"{len(jobs)} cells {spec.benchmark.name}"
        with (
            threads(spec.engine.threads),
            contextlib.redirect_stdout(sys.stderr),
            progress.cell_progress(title, board, jobs[0].key, quiet=ranks.rank > 0) as bar,
        ):
            bar.phase(f"opening {spec.benchmark.name}")
            loaded = open_benchmark(spec, ranks, shelf)
            bar.phase(f"loading {spec.model.name}")
            adapter = pool.adapter(spec.model)
            sharers = [
                SharedRun(
                    cell.spec,
                    cell.method,
                    journal_of(cell, directory).of_rank(ranks.rank),
                    prior_for(cell.spec.model, cell.method, cell.spec.store),
                )
                for cell, directory in zip(jobs, directories, strict=True)
            ]
            bar.phase(title)
            collect_again()
            answer_together(sharers, adapter, loaded, bar.samples, ranks)
        counts_by_rank = ranks.gather([cell.fresh for cell in sharers])
        totals = map(sum, zip(*counts_by_rank, strict=True))
        self.fresh |= {job.key: total for job, total in zip(jobs, totals, strict=True)}


def begin(job: Job, directory: RunDir) -> bool:
    """Prepare the directory of a run; return whether it has answers."""
    directory.describe(job.parts)
    return bool(len(journal_of(job, directory)))


def journal_of(job: Job, directory: RunDir) -> Journal:
    """Return the journal of a run; a forced run has a separate one, since the old row is kept until it is finished."""
    return directory.forced if job.spec.force else directory.journal


def _claim(job: Job, claims: contextlib.ExitStack, ranks: Ranks) -> bool:
    """Claim a run for the length of the pass; return False if another command computes it."""
    directory = Store(job.spec.store).run(job.key)
    return ranks.first(lambda: claims.enter_context(directory.claim(0.0, job.spec.lease)))


def _tell(
    job: Job, separate: Sequence[Job], reasons_by_key: dict[str, str | None], count: int
) -> None:
    """Print in one line which cells share a pass and which do not."""
    reasons = grouped(
        (reasons_by_key[cell.key], f"{cell.spec.method.title} {cell.spec.budget.amount}")
        for cell in separate
    )
    separate_text = "".join(
        f"; by itself: {', '.join(cells)} ({why})" for why, cells in reasons.items()
    )
    where = f"{job.spec.model.name} on {job.spec.benchmark.name}"
    shared = (
        f"{count} cells of {where} in one pass" if count > 1 else f"nothing to share of {where}"
    )
    tell_once(f"engine.share=prefix: {shared}{separate_text}")


def why_not_shared(spec: RunSpec, method: Method) -> str | None:
    """Return why a run cannot share a pass with others; None if it can."""
    engine, facts = spec.engine, spec.model.facts
    reducer = kind_of(method, spec).prompt_reducer(method)
    sites = () if reducer is None else reducer.all_sites(facts.tower.layers, facts.text.layers)
    meter = next(iter(engine.meters), None)
    reasons = (
        (engine.batch_size == "auto", "engine.batch_size=auto is found for each cell"),
        (
            engine.backend != "drop",
            f"engine.backend={engine.backend} runs every layer by itself",
        ),
        (
            engine.separators != "keep",
            f"engine.separators={engine.separators} counts other tokens than a whole prompt does",
        ),
        (
            engine.scope != "prompt",
            f"engine.scope={engine.scope} chooses in each picture by itself",
        ),
        (engine.rescore, "engine.rescore=true starts from pixels"),
        (meter is not None, f"engine.{meter}=true counts every answer by itself"),
        (spec.benchmark.prompt_tokens is not None, "the benchmark measures times alone"),
        (facts.denoises, "the model denoises its answers"),
        (reducer is None, "the method drafts"),
        (reducer is not None and reducer.shrinks_pictures, "the method changes the pictures"),
        (any(site.in_tower for site in sites), "the method acts inside the vision tower"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def frame(spec: RunSpec) -> RunSpec:
    """Return the part of a spec that runs of one pass have in common: all but the method and its budget."""
    return replace(spec, method=MethodSpec(""), budget=WHOLE, report=None, curves=None)
