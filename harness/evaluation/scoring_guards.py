"""Guards of scoring: an exception or a NaN is reported with its benchmark, metric and sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from numbers import Real
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.lmms_tasks import metric_names
from espalier.harness.evaluation.metric_scores import needed_metrics
from espalier.harness.evaluation.samples import Failure, Key
from espalier.harness.evaluation.stated_answers import strict_scoring
from espalier.harness.specs.benchmark_spec import Answers, BenchmarkSpec


def guard_scoring(
    task: Task,
    failures: list[Failure],
    extra_results: Callable[[Key], list[str]] = lambda key: [],
    answers: Answers | None = None,
) -> None:
    """Make `task.process_results` skip and name a sample when it raises or gives NaN, without retries.

    `extra_results` returns what the task scores besides the answer of a sample: a judge's verdict, or measured times.
    `answers` is the form of its answers if a strict reader precedes the task's.

    lmms-eval passes the document but not its id. Serial scoring (`process_docs_parallel=1`) visits the documents in
    ascending order, once for each filter, so the number of calls gives the id. A sample without metric values enters no
    aggregate.
    """
    method = type(task).process_results
    plain_score: Callable[..., Mapping[str, Any]] = partial(
        getattr(method, "__wrapped__", method), task
    )
    score = strict_scoring(plain_score, answers)
    calls = 0

    def guarded(doc: Any, results: Any, **options: Any) -> Mapping[str, Any]:
        nonlocal calls
        ids = sorted({instance.doc_id for instance in task.instances})
        doc_id = ids[calls % len(ids)]
        calls += 1
        try:
            values = [*results, *extra_results((task.config.task, doc_id))]
            return _numbers(score(doc, values, **options))
        except Exception as error:  # a task's scoring may raise anything
            failures.append(Failure.from_exception((task.config.task, doc_id), error))
            return {}

    task.process_results = guarded


def guard_aggregation(task: Task, benchmark: str, wanted: Sequence[str], grouped: bool) -> None:
    """Make a task compute only the wanted metrics (all if there are none), and report a metric that raises.

    Other metrics may write a file for a server, or need programs that are not installed.
    """
    functions = type(task).aggregation(task)
    name = task.config.task

    def guarded(metric: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if wanted and (f"{name}/{metric}" if grouped else metric) not in wanted:
            return lambda values: math.nan

        @wraps(function)
        def aggregate(values: list[Any], *args: Any, **options: Any) -> Any:
            try:
                return function(values, *args, **options)
            except Exception as error:
                # A task's function may raise anything. Resampling calls it without this guard.
                raise Unscored(
                    benchmark, name, metric, f"{type(error).__name__}: {error}"
                ) from error

        return aggregate

    table = {metric: guarded(metric, function) for metric, function in functions.items()}
    task.aggregation = lambda: table


class Unscored(UserError):
    """A metric of a benchmark could not be computed."""

    def __init__(self, benchmark: str, task: str, metric: str, reason: str) -> None:
        """Name benchmark, task and metric, and the reason, in one line."""
        self.parts = (benchmark, task, metric, reason)
        line = " ".join(reason.split())
        super().__init__(
            f"benchmark={benchmark}: {metric} of task {task} cannot be computed: {line} (answers are saved)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the arguments: processes of a run exchange their errors."""
        return Unscored, self.parts


def check_values(
    results: Mapping[str, Any], tasks: Sequence[Task], benchmark: BenchmarkSpec
) -> None:
    """Raise Unscored if a needed metric that a sample has is not a finite number."""
    wanted = needed_metrics(benchmark, tasks)
    for name, (task, metric) in metric_names(tasks).items():
        if name not in wanted or not any(metric in sample for sample in results["samples"][task]):
            continue
        for key, value in results["results"][task].items():
            if key.partition(",")[0] == metric and not _is_finite(value):
                raise Unscored(benchmark.name, task, metric, f"its aggregation gives {value!r}")


def _numbers(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics of a sample; raises ValueError if a number is NaN or infinite."""
    for metric, value in metrics.items():
        number = value.get("score") if isinstance(value, Mapping) else value
        if isinstance(number, Real) and not math.isfinite(float(number)):
            raise ValueError(f"metric {metric} is {float(number)}")
    return metrics


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(float(value))
