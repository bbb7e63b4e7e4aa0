"""The headline metric of the answers so far, to watch a run; its row is scored by lmms-eval at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.evaluation.samples import Key, Sample
from espalier.harness.evaluation.stated_answers import strict_scoring
from espalier.harness.specs.benchmark_spec import BenchmarkSpec


class RunningScore:
    """Scores each answer by its task, as soon as it is there.

    Args:
        tasks: of the benchmark, as loaded.
        benchmark: names the headline. With a judge nothing is scored: it answers at the end.
    """

    def __init__(self, tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
        scored = () if "judge" in benchmark.needs else tasks
        self._score: dict[str, Callable[..., Mapping[str, Any]]] = {
            task.config.task: strict_scoring(
                partial(type(task).process_results, task), benchmark.answers
            )
            for task in scored
        }
        self._task, _, self._metric = benchmark.headline.rpartition("/")
        self._values: dict[Key, float] = {}

    @property
    def value(self) -> float | None:
        """Mean of the headline metric over the samples so far; None where it is no mean of numbers, or one failed."""
        return sum(self._values.values()) / len(self._values) if self._values else None

    def add(self, samples: Iterable[Sample], document: Callable[[Sample], Any]) -> None:
        """Score samples; `document` returns the document of one."""
        for sample in samples:
            score = self._score.get(sample.task)
            if score is None or self._task not in ("", sample.task):
                continue
            try:
                value = score(document(sample), [sample.scored]).get(self._metric)
            except Exception:  # a task's scoring may raise anything; the end of the run reports it
                self._score.clear()  # a mean without this sample would be no mean of the answers
                self._values.clear()
                return
            if isinstance(value, Real):
                self._values[sample.key] = float(value)
