"""Contributions of samples to the metrics of a run, whether the metrics are means or not.

For these a task's aggregation is called again, on parts of the samples and in this process: whatever else it does, such
as asking a server, it does each time. `benchmark.blocks=0` leaves out all but the check of a mean.
"""

from __future__ import annotations

import inspect
import io
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lmms_eval.api.task import Task

from espalier.harness.evaluation.influence import (
    NoContributions,
    influence,
    is_mean,
    unit_aggregates,
)
from espalier.harness.evaluation.lmms_tasks import metric_names
from espalier.harness.evaluation.metric_scores import (
    Metrics,
    Scores,
    collect,
    members_of,
    needed_metrics,
)
from espalier.harness.evaluation.samples import Key
from espalier.harness.evaluation.statistical_units import Partition, partition
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, Derived
from espalier.harness.stats import by_unit

#: How a metric follows from its samples, as stored in rows: mean, leave-one-out, from other metrics, or unknown.
MEAN, INFLUENCE, COMBINED, ONCE = "mean", "influence", "combined", "once"


@dataclass(frozen=True)
class MetricShare:
    """Contributions of samples to one metric.

    Attributes:
        how: one of the words above.
        values: contributions, with the metric as their mean; empty if not known.
        units: (task, first document of its unit) of each sample.
        sample_scores: scores of single samples that differ from their contributions.
        stderr: standard error of the metric; None if not known.
        note: why contributions are not known.
    """

    how: str
    values: Mapping[Key, float] = field(default_factory=dict)
    units: Mapping[Key, Key] = field(default_factory=dict)
    sample_scores: Mapping[Key, float] = field(default_factory=dict)
    stderr: float | None = None
    note: str | None = None

    def summary(self) -> dict[str, Any]:
        """Return the row's entry."""
        units = len(set(self.units.values()))
        return {"how": self.how, "samples": len(self.values), "units": units, "note": self.note}


@dataclass(frozen=True)
class ScoredRun:
    """The metrics of a run, and the contributions of its samples.

    Attributes:
        metrics: {name: {"value", "stderr"}}.
        scores: {(task, doc id): {metric: contribution}}; the mean over samples is the metric.
        units: {(task, doc id): {metric: first document of the unit}} where that is not the sample itself.
        how: {metric: {how, samples, units, note}}, see `Share`.
        values: {(task, doc id): {metric: raw value}} of metrics that are not a mean of numbers.
        sample_scores: {(task, doc id): {metric: score}} of single samples where it is not their contribution.
        unparsed: answers in no form that the scorer knows; None if it does not count them.
    """

    metrics: Metrics
    scores: Scores
    units: Mapping[Key, Mapping[str, int]]
    how: Mapping[str, Mapping[str, Any]]
    values: Mapping[Key, Mapping[str, Any]]
    sample_scores: Mapping[Key, Mapping[str, float]]
    unparsed: int | None


def score(
    results: Mapping[str, Any], tasks: Sequence[Task], benchmark: BenchmarkSpec, ours: bool
) -> ScoredRun:
    """Return the metrics that a benchmark reports (all if it names none), with the contributions of samples.

    Args:
        results: lmms-eval's results.
        tasks: the tasks of the benchmark.
        benchmark: the benchmark, with metrics, derived metrics, clusters and blocks.
        ours: whether the tasks come from the include path. Standard errors of their metrics that are not means are the
            bootstrap's, unless the benchmark names its units; all others follow from the contributions.

    Raises:
        UserError: the column of clusters does not exist.

    Cost: one aggregation per unit for a metric that is not a mean (harness/evaluation/influence.py).
    """
    resample = ours and benchmark.blocks is None and benchmark.cluster is None
    metrics, scores = collect(results, tasks, needed_metrics(benchmark, tasks), resample)
    by_name = {task.config.task: task for task in tasks}
    parts = {name: partition(name, results["samples"][name], benchmark) for name in by_name}
    shares, values = {}, dict[Key, dict[str, Any]]()
    for name, (task, metric) in metric_names(tasks).items():
        if name not in metrics:
            continue
        by_sample = {key: scores_of[name] for key, scores_of in scores.items() if name in scores_of}
        raw = _raw(results["samples"][task], metric)
        if metrics[name]["value"] is None or (
            by_sample and _is_mean(by_name[task], metric, raw, by_sample)
        ):
            shares[name] = _mean(by_sample, parts[task].clusters)
            continue
        if by_sample:
            metrics[name]["stderr"] = None
        for doc_id, raw_value in raw.items():
            values.setdefault((task, doc_id), {})[name] = raw_value
        shares[name] = _leave_one_out(
            by_name[task], metric, raw, metrics[name]["value"], parts[task], benchmark.blocks
        )
    for name, derived in benchmark.derived.items():
        members = members_of(derived, metric_names(tasks))
        value, shares[name] = _combined(derived, members, metrics, shares, parts)
        metrics[name] = {"value": value, "stderr": None}
    return _scored(metrics, shares, benchmark, values, _unparsed(results["samples"]))


def _mean(values: Mapping[Key, float], clusters: Mapping[int, int]) -> MetricShare:
    units = {key: (key[0], clusters[key[1]]) for key in values}
    clustered = len(set(units.values())) < len(values)
    return MetricShare(MEAN, values, units, stderr=_stderr(values, units) if clustered else None)


def _unit_mean(scores: Mapping[Key, float], clusters: Mapping[int, int]) -> MetricShare:
    """Return the contributions to a mean over units, given the score of each sample's unit.

    Contributions are weighted by unit size, so that every unit counts the same.
    """
    units = {key: (key[0], clusters[key[1]]) for key in scores}
    sizes = Counter(units.values())
    mean = math.fsum(scores[key] / sizes[units[key]] for key in scores) / len(sizes)
    scale = len(scores) / len(sizes)
    values = {
        key: mean + (score - mean) * scale / sizes[units[key]] for key, score in scores.items()
    }
    return MetricShare(
        MEAN, values, units, sample_scores=dict(scores), stderr=_stderr(values, units)
    )


def _is_mean(task: Task, metric: str, raw: Mapping[int, Any], scores: Mapping[Key, float]) -> bool:
    numbers = [scores.get((task.config.task, doc_id)) for doc_id in raw]
    values = [value for value in numbers if value is not None]
    if len(values) < len(numbers):
        return True
    with _called_again() as folder:
        return is_mean(aggregation(task, metric, folder), list(raw.values()), values)


def _leave_one_out(
    task: Task,
    metric: str,
    raw: Mapping[int, Any],
    value: float | None,
    parts: Partition,
    block_count: int | None,
) -> MetricShare:
    if block_count == 0:
        return MetricShare(ONCE, note="benchmark.blocks=0: computed once only")
    name = task.config.task
    blocks, clusters = parts.blocks, parts.clusters
    keys = [(name, doc_id) for doc_id in raw]
    try:
        with _called_again() as folder:
            aggregate = aggregation(task, metric, folder)
            recomputed = float(aggregate(list(raw.values())))
            if value is None or not math.isclose(recomputed, value, rel_tol=1e-6, abs_tol=1e-9):
                raise NoContributions(f"computed again it is {recomputed:.6g}, not {value}")
            units = [clusters[doc_id] for doc_id in raw]
            single_units = unit_aggregates(aggregate, list(raw.values()), units, value)
            if single_units is not None:
                return _unit_mean(dict(zip(keys, map(float, single_units), strict=True)), clusters)
            influences = influence(
                aggregate, list(raw.values()), [blocks[doc_id] for doc_id in raw]
            )
    except NoContributions as reason:
        return MetricShare(ONCE, note=str(reason))
    contributions = dict(zip(keys, map(float, influences.values), strict=True))
    units_of = {key: (name, blocks[key[1]]) for key in keys}
    return MetricShare(INFLUENCE, contributions, units_of, stderr=influences.stderr)


@contextmanager
def _called_again() -> Iterator[Path]:
    """Drop printed text, and yield a folder for files, which is removed at the end of the block."""
    text = io.StringIO()
    with TemporaryDirectory() as folder, redirect_stdout(text), redirect_stderr(text):
        yield Path(folder)


def aggregation(task: Task, metric: str, folder: Path) -> Callable[[list[Any]], Any]:
    """Return a task's aggregation as a function of values only; its files go to a folder."""
    function = task.aggregation()[metric]
    # Without the guard of the run's scoring.
    function = getattr(function, "__wrapped__", function)
    if "args" in inspect.signature(function).parameters:
        return partial(function, args=Namespace(output_path=str(folder)))
    return function  # type: ignore[no-any-return]


def _combined(
    derived: Derived,
    members: Sequence[str],
    metrics: Metrics,
    shares: Mapping[str, MetricShare],
    parts: Mapping[str, Partition],
) -> tuple[float | None, MetricShare]:
    """Return a derived metric and the contributions of samples to it.

    Members may have different samples. Deviations are scaled, so that each member counts over all samples as it does
    over its own.
    """
    values = [metrics[name]["value"] for name in members]
    lacking = [name for name, number in zip(members, values, strict=True) if number is None]
    if lacking:
        return None, MetricShare(ONCE, note=f"{lacking[0]} has no value")
    weight = 1.0 if derived.how == "sum" else 1 / len(members)
    value = weight * sum(number for number in values if number is not None)
    silent = [name for name in members if not shares[name].values]
    if silent:
        return value, MetricShare(ONCE, note=f"{silent[0]}: {shares[silent[0]].note}")
    keys = sorted({key for name in members for key in shares[name].values})
    contributions = dict.fromkeys(keys, value)
    for name in members:
        deviations = shares[name].values
        mean, scale = math.fsum(deviations.values()) / len(deviations), len(keys) / len(deviations)
        for key, contribution in deviations.items():
            contributions[key] += weight * scale * (contribution - mean)
    in_blocks = {
        key[0] for name in members if shares[name].how == INFLUENCE for key in shares[name].units
    }
    units = {
        key: (
            key[0],
            (parts[key[0]].blocks if key[0] in in_blocks else parts[key[0]].clusters)[key[1]],
        )
        for key in keys
    }
    return value, MetricShare(COMBINED, contributions, units, stderr=_stderr(contributions, units))


def _scored(
    metrics: Metrics,
    shares: Mapping[str, MetricShare],
    benchmark: BenchmarkSpec,
    values: Mapping[Key, Mapping[str, Any]],
    unparsed: int | None,
) -> ScoredRun:
    reported = benchmark.metrics or tuple(metrics)
    names = sorted(
        (name for name in metrics if _bare(name) in reported),
        key=lambda name: reported.index(_bare(name)),
    )
    scores, own_scores, units = Scores(), Scores(), dict[Key, dict[str, int]]()
    for name in (name for name in names if name in shares):
        if shares[name].stderr is not None and metrics[name]["stderr"] is None:
            metrics[name]["stderr"] = shares[name].stderr
        if shares[name].how == MEAN and shares[name].stderr is not None:
            # The error of a mean over samples assumes independence, which samples of one cluster lack.
            metrics[name]["stderr"] = shares[name].stderr
        for key, value in shares[name].values.items():
            scores.setdefault(key, {})[name] = value
            if key in shares[name].sample_scores:
                own_scores.setdefault(key, {})[name] = shares[name].sample_scores[key]
            if shares[name].units[key] != key:
                units.setdefault(key, {})[name] = shares[name].units[key][1]
    return ScoredRun(
        metrics={name: metrics[name] for name in names},
        scores=dict(sorted(scores.items())),
        units=units,
        how={name: shares[name].summary() for name in names if name in shares},
        values=values,
        sample_scores=own_scores,
        unparsed=unparsed,
    )


def _bare(name: str) -> str:
    return name.partition(",")[0]


def _stderr(contributions: Mapping[Key, float], units: Mapping[Key, Key]) -> float | None:
    by_units = by_unit(
        np.array(list(contributions.values())), [units[key] for key in contributions]
    )
    return float(by_units.std(ddof=1) / math.sqrt(len(by_units))) if len(by_units) > 1 else None


def _raw(logged: Sequence[Mapping[str, Any]], metric: str) -> dict[int, Any]:
    """Return the raw value of a metric for each document; of several filters the default one counts."""
    values: dict[int, Any] = {}
    for sample in logged:
        if metric in sample:
            values.setdefault(int(sample["doc_id"]), sample[metric])
    return values


def _unparsed(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> int | None:
    """Count the answers that the metric `unparsed` of tasks marks; None if a task lacks this metric."""
    marks = [_raw(logged, "unparsed") for logged in samples.values()]
    if not all(marks):
        return None
    return sum(bool(mark) for marks_of_task in marks for mark in marks_of_task.values())
