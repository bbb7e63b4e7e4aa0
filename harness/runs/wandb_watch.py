"""What W&B shows of a run besides its row: the progress while it is computed, and pictures of samples afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError, plain
from espalier.harness.evaluation.samples import Key, SampleErrors
from espalier.harness.evaluation.stated_answers import RunningScore
from espalier.harness.runs.wandb_log import Mirror
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.store.stored_answers import best_score

if TYPE_CHECKING:
    from espalier.harness.evaluation.evaluate import Evaluation
    from espalier.harness.evaluation.task_cache import TaskCache
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.runs.admission import Job

#: Called with the finished and all samples.
Progress = Callable[[int, int], None]


class Watch:
    """Feeds the mirror of a run.

    Args:
        mirror: opened here.
        tasks: of the benchmark.
        benchmark: names the headline.
    """

    def __init__(self, mirror: Mirror, tasks: Sequence[Any], benchmark: BenchmarkSpec) -> None:
        self._mirror = mirror
        self.running = RunningScore(tasks, benchmark)
        mirror.begin()

    def progress(self, progress: Progress) -> Progress:
        """Return a function that calls `progress`, and logs."""

        def report(finished: int, total: int) -> None:
            progress(finished, total)
            self._mirror.progress(finished, total, self.running.value)

        return report

    def draw(self, job: Job, adapter: Adapter, evaluation: Evaluation, shelf: TaskCache) -> None:
        """Draw the samples without full marks for the mirror, `log.pictures` of them, the worst first."""
        count, benchmark = job.spec.log_pictures, job.spec.benchmark
        if not count or benchmark.prompt_tokens is not None:
            return
        # It loads matplotlib.
        from espalier.harness.runs.sample_pictures import draw_samples

        try:
            worst = worst_samples(evaluation, benchmark)[:count]
            pictures = draw_samples(job.spec, job.method, adapter, worst, shelf)
            self._mirror.pictures = sorted(pictures, key=lambda picture: worst.index(picture.key))
        except (UserError, SampleErrors) as error:
            print(f"log=wandb: no pictures of run {job.key}: {plain(str(error))}", file=sys.stderr)


def worst_samples(evaluation: Evaluation, benchmark: BenchmarkSpec) -> list[Key]:
    """Return the samples without full marks in the headline, the worst first, and in the order of the benchmark."""
    sign = 1 if benchmark.higher_is_better else -1
    name = benchmark.headline
    scores = {
        sample.key: evaluation.scores.get(sample.key, {}).get(name, 0.0)
        for sample in evaluation.samples
    }
    best = best_score([*scores.values()], benchmark.higher_is_better) if scores else None
    wrong_keys = (key for key, score in scores.items() if score != best)
    return sorted(wrong_keys, key=lambda key: (sign * scores[key], key))
