"""Convert lmms-eval's results to metrics: values, standard errors, values of each sample.

A benchmark may derive metrics from those of its tasks; their names are checked before a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.lmms_tasks import metric_names
from espalier.harness.evaluation.samples import Failure
from espalier.harness.evaluation.stated_answers import strict_scoring
from espalier.harness.specs.benchmark_spec import Answers, BenchmarkSpec, Derived
from espalier.harness.store.answer_digest import Key

#: Bootstrap resamples: enough for two digits of a standard error.
RESAMPLES = 500

Metrics = dict[str, dict[str, float | None]]
Scores = dict[Key, dict[str, float]]

#: Prefix of a member that means one metric of every task of a group.
EVERY = "*/"


def collect(
    results: Mapping[str, Any], tasks: Sequence[Task], wanted: Sequence[str], resample: bool
) -> tuple[Metrics, Scores]:
    """Return {metric: {"value", "stderr"}} and {(task, doc id): {metric: value}}.

    Only the `wanted` metrics are returned, all if it is empty; a metric that no sample has is None.
    Metrics that are a mean over samples have values of samples: their mean must equal the metric,
    possibly as a percentage. The standard error is then s / sqrt(n) with the sample standard
    deviation. For other metrics (F1, corpus scores) it is the bootstrap's if `resample`, which
    calls the task's aggregation RESAMPLES times, else None.
    """
    aggregations = {task.config.task: task.aggregation() for task in tasks}
    metrics: Metrics = {}
    scores: Scores = {}
    for name, (task, metric) in metric_names(tasks).items():
        if wanted and name not in wanted:
            continue
        logged = results["samples"][task]
        metrics[name] = {"value": None, "stderr": None}
        for suffix, value in _values(results["results"][task], metric):
            metrics[name + suffix] = {"value": value, "stderr": None}
            each = _each(logged, metric) if not suffix else {}
            scale = _scale(list(each.values()), value)
            if scale is None:
                if resample and not suffix:
                    raw = [sample[metric] for sample in logged if metric in sample]
                    metrics[name]["stderr"] = _bootstrap(aggregations[task][metric], raw)
                continue
            numbers = np.array(list(each.values())) * scale
            if len(numbers) > 1:
                metrics[name]["stderr"] = float(numbers.std(ddof=1) / math.sqrt(len(numbers)))
            for doc_id, number in zip(each, numbers, strict=True):
                scores.setdefault((task, doc_id), {})[name] = float(number)
    order = {name: place for place, name in enumerate(wanted)}
    return dict(sorted(metrics.items(), key=lambda item: order.get(item[0], len(order)))), scores


def _bootstrap(aggregate: Callable[[list[Any]], float], raw: Sequence[Any]) -> float:
    """Return the standard deviation of an aggregate over resampled documents."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(raw), size=(RESAMPLES, len(raw)))
    return float(np.std([aggregate([raw[i] for i in draw]) for draw in draws], ddof=1))


def _values(results: Mapping[str, Any], metric: str) -> list[tuple[str, float]]:
    """Return (suffix, value) for each filter; the default filter, `none` or else the first, has no suffix."""
    by_filter = {
        key.removeprefix(f"{metric},"): float(value)
        for key, value in results.items()
        if key.startswith(f"{metric},") and key != f"{metric}," and _is_number(value)
    }
    usual = "none" if "none" in by_filter else next(iter(by_filter), None)
    return [("" if chosen == usual else f",{chosen}", value) for chosen, value in by_filter.items()]


def _each(samples: Sequence[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Return the metric of each document: a number, or a table with the number under `score`."""
    values: dict[int, float] = {}
    for sample in samples:
        value = sample.get(metric)
        value = value.get("score") if isinstance(value, Mapping) else value
        if _is_number(value):
            # A document is logged once for each filter; the default filter comes first.
            values.setdefault(int(sample["doc_id"]), float(value))
    return values


def _scale(numbers: Sequence[float], value: float) -> float | None:
    """Return the factor between the mean of numbers and a value, 1 or 100; None if it is another or there are none."""
    mean = float(np.mean(numbers)) if numbers else math.nan
    equal = partial(math.isclose, value, rel_tol=1e-6, abs_tol=1e-9)
    return next((scale for scale in (1.0, 100.0) if equal(scale * mean)), None)


def _is_number(value: object) -> TypeGuard[Any]:
    return isinstance(value, Real | np.number | np.bool_) and math.isfinite(float(value))


def members_of(derived: Derived, names: Iterable[str]) -> list[str]:
    """Return the metrics that a derived metric is computed from, in the order of the tasks."""
    available = list(names)
    members = []
    for member in derived.of:
        metric = member.removeprefix(EVERY)
        members += [
            name
            for name in available
            if metric == (name if metric == member else name.partition("/")[2])
        ]
    return members


def needed_metrics(benchmark: BenchmarkSpec, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return the task metrics that a benchmark reports or derives metrics from; an empty tuple means all."""
    if not benchmark.metrics:
        return ()
    names = metric_names(tasks)
    derived = [
        member for formula in benchmark.derived.values() for member in members_of(formula, names)
    ]
    task_metrics = [name for name in benchmark.metrics if name not in benchmark.derived]
    return tuple(dict.fromkeys([*task_metrics, *derived]))


def check_derived(tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
    """Raise UserError if a member of a derived metric does not exist in the tasks."""
    names = metric_names(tasks)
    for name, formula in benchmark.derived.items():
        if name in names:
            raise UserError(
                f"benchmark.derived.{name} is a metric of the task itself; valid: another name"
            )
        for member in formula.of:
            if not members_of(Derived(formula.how, (member,)), names):
                raise UserError(
                    f"benchmark.derived.{name}: {member!r} is unknown; valid: {', '.join(sorted(names))}"
                )


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
            metrics = score(doc, values, **options)
            for metric, value in metrics.items():
                number = value.get("score") if isinstance(value, Mapping) else value
                if isinstance(number, Real) and not math.isfinite(float(number)):
                    raise ValueError(f"metric {metric} is {float(number)}")
            return metrics
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
                raise Unscored.of(
                    benchmark, name, metric, f"{type(error).__name__}: {error}"
                ) from error

        return aggregate

    table = {metric: guarded(metric, function) for metric, function in functions.items()}
    task.aggregation = lambda: table


class Unscored(UserError):
    """A metric of a benchmark could not be computed."""

    @classmethod
    def of(cls, benchmark: str, task: str, metric: str, reason: str) -> Unscored:
        """Return the error that names benchmark, task and metric, and the reason, in one line."""
        line = " ".join(reason.split())
        return cls(
            f"benchmark={benchmark}: {metric} of task {task} cannot be computed: {line} (answers are saved)"
        )


def check_values(
    results: Mapping[str, Any], tasks: Sequence[Task], benchmark: BenchmarkSpec
) -> None:
    """Raise Unscored if a needed metric that a sample has is not a finite number."""
    wanted = needed_metrics(benchmark, tasks)
    for name, (task, metric) in metric_names(tasks).items():
        if name not in wanted or not any(metric in sample for sample in results["samples"][task]):
            continue
        for key, value in results["results"][task].items():
            finite = isinstance(value, Real) and math.isfinite(float(value))
            if key.partition(",")[0] == metric and not finite:
                raise Unscored.of(benchmark.name, task, metric, f"its aggregation gives {value!r}")
