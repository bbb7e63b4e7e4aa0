"""What each sample contributes to each metric: means, leave-one-out influences, and the samples that are one unit."""

from __future__ import annotations

import inspect
import io
import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lmms_eval.api.task import Task
from numpy.typing import NDArray

from espalier.harness.errors import UserError, tell_once
from espalier.harness.evaluation.lmms_tasks import metric_names
from espalier.harness.evaluation.metric_scores import (
    Metrics,
    Scores,
    collect,
    members_of,
    needed_metrics,
)
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, Cluster, Derived
from espalier.harness.specs.comparable import grouped
from espalier.harness.stats import by_unit
from espalier.harness.stats.interval import Array
from espalier.harness.store.answer_digest import Key

#: {doc id: the first doc id of its unit}.
Units = Mapping[int, int]


@dataclass(frozen=True)
class Partition:
    """The units of one task: clusters are independent of each other, blocks consist of clusters."""

    clusters: Units
    blocks: Units


def partition(
    task: str, logged: Sequence[Mapping[str, Any]], benchmark: BenchmarkSpec
) -> Partition:
    """Return the units of logged samples; equal samples give equal units.

    Raises:
        UserError: the column of clusters does not exist, or has a value for its modulo that is not an integer.
    """
    docs = {int(sample["doc_id"]): sample.get("doc", {}) for sample in logged}
    first: dict[Any, int] = {}
    clusters = {
        doc: first.setdefault(_cluster(task, doc, docs[doc], benchmark.cluster), doc)
        for doc in sorted(docs)
    }
    units = sorted(set(clusters.values()))
    block_numbers = dict(zip(units, assign_blocks(units, len(docs), benchmark.blocks), strict=True))
    leader: dict[int, int] = {}
    blocks = {doc: leader.setdefault(block_numbers[unit], doc) for doc, unit in clusters.items()}
    return Partition(clusters, blocks)


def set_clusters(tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
    """Make tasks ask the first clusters that hold `benchmark.limit` samples, each as a whole, in the order of the data.

    Without a limit, or without clusters, tasks are unchanged.

    Raises:
        UserError: the column of clusters is not in the data of a task, or has a value for its modulo that is not an
            integer.
    """
    cluster, limit = benchmark.cluster, benchmark.limit
    if cluster is None:
        return
    for task in tasks:
        columns = getattr(task.eval_docs, "column_names", None)
        if columns is not None:
            _check_column(task.config.task, columns, cluster)
        if limit is not None:
            task.build_all_requests = partial(_ask, task, _first_clusters(task, limit, cluster))


def _first_clusters(task: Task, limit: int, cluster: Cluster) -> frozenset[int]:
    """Return the ids of the samples of the first clusters."""
    members = grouped(
        (_cluster(task.config.task, doc_id, doc, cluster), doc_id)
        for doc_id, doc in enumerate(task.eval_docs_no_media)
    )
    chosen: list[int] = []
    for ids in members.values():
        if len(chosen) < limit:
            chosen += ids
    if len(chosen) > limit:
        tell_once(
            f"limit={limit}: {len(chosen)} samples of {task.config.task}, because those with one "
            f"{cluster.column} are scored together"
        )
    return frozenset(chosen)


def _ask(task: Task, chosen: frozenset[int], **options: Any) -> None:
    """Build the requests of chosen samples; lmms-eval scores only samples with a request."""
    type(task).build_all_requests(task, **options)
    task._instances = [instance for instance in task.instances if instance.doc_id in chosen]


def _check_column(task: str, columns: Iterable[str], cluster: Cluster) -> None:
    if cluster.column not in columns:
        raise UserError(
            f"benchmark.cluster={cluster.column!r} is not a column of {task}; valid: {', '.join(map(str, columns))}"
        )


def _cluster(task: str, doc_id: int, doc: Mapping[str, Any], cluster: Cluster | None) -> Any:
    if cluster is None:
        return doc_id
    _check_column(task, doc, cluster)
    value = doc[cluster.column]
    if cluster.modulo is None:
        return str(value)
    if not isinstance(value, int):
        raise UserError(
            f"benchmark.cluster.column={cluster.column!r} is {value!r} in {task}/{doc_id}; valid: integers"
        )
    return value % cluster.modulo


#: Up to this number, units are left out one by one; more units are left out in blocks.
ALONE = 2000

#: Samples that all evaluations of an aggregate may process in total, beyond `ALONE` units.
VISITS = 10_000_000

#: Smallest number of blocks: a standard error from 200 blocks is known to 5 %.
BLOCKS = 200

#: Smallest number of units for which contributions are computed.
FEWEST = 10

#: Number of random halves that are predicted, share of their variance that must be explained, and the factor by which
#: the predicted spread may miss theirs.
HALVES, EXPLAINED, FACTOR = 64, 0.8, 1.4

#: Number of random halves on which a mean must be a mean.
PROBES = 3

#: Seconds that all leave-one-out evaluations of an aggregate may take.
PATIENCE = 300.0

Aggregate = Callable[[list[Any]], Any]


class NoContributions(Exception):
    """An aggregate has no reliable contributions of samples; the message is the reason."""


@dataclass(frozen=True)
class Influence:
    """Contributions of samples.

    Attributes:
        values: (n,) contribution of each sample; their mean is the aggregate.
        stderr: standard error of the aggregate.
    """

    values: Array
    stderr: float


def assign_blocks(
    units: Sequence[int], samples: int, blocks: int | None, seed: int = 0
) -> list[int]:
    """Return a block for each unit, the units themselves if there are few; equal arguments give equal blocks.

    Args:
        units: distinct units, in order.
        samples: number of samples in all units.
        blocks: number of blocks; None: as many as `VISITS` allows.
        seed: of the permutation that assigns blocks; it makes blocks independent of the order of samples.
    """
    count = blocks or (len(units) if len(units) <= ALONE else max(BLOCKS, VISITS // samples))
    if count >= len(units):
        return list(range(len(units)))
    return [int(place) for place in np.random.default_rng(seed).permutation(len(units)) % count]


def unit_aggregates(
    aggregate: Aggregate, raw: Sequence[Any], units: Sequence[int], value: float
) -> Array | None:
    """Return the aggregate of each single unit if their mean is the total aggregate; else None.

    Many aggregates of tasks are means of samples or of groups, such as circular accuracies. For an aggregate of zero
    the test would be too weak.

    Args:
        aggregate: the task's function of a list of values.
        raw: (n,) one value per sample.
        units: (n,) the unit of each sample.
        value: the total aggregate; tasks may have rounded it to five digits.

    Returns:
        (n,) the aggregate of each sample's unit.
    """
    members = grouped(zip(units, raw, strict=True))
    try:
        aggregates = {unit: _value(aggregate, values) for unit, values in members.items()}
    except NoContributions:
        return None
    mean = math.fsum(aggregates.values()) / len(aggregates)
    if value == 0 or not math.isclose(mean, value, rel_tol=1e-4):
        return None
    return np.array([aggregates[unit] for unit in units])


def is_mean(aggregate: Aggregate, raw: Sequence[Any], numbers: Sequence[float]) -> bool:
    """Return whether the aggregates of random halves are means of their numbers, as the total aggregate is.

    The total may equal the mean by chance: F1 is the accuracy if there are as many true positives as true negatives.
    An aggregate that fails on halves counts as a mean.
    """
    rng = np.random.default_rng(0)
    for _ in range(PROBES if len(raw) > 1 else 0):
        half = rng.permutation(len(raw))[: len(raw) // 2].tolist()
        try:
            value = _value(aggregate, [raw[i] for i in half])
        except NoContributions:
            return True
        mean = math.fsum(numbers[i] for i in half) / len(half)
        if not math.isclose(value, mean, rel_tol=1e-4, abs_tol=1e-9):
            return False
    return True


def influence(
    aggregate: Aggregate, raw: Sequence[Any], units: Sequence[int], seed: int = 0
) -> Influence:
    """Return the contribution of each sample to `aggregate(raw)`.

    Args:
        aggregate: the task's function of a list of values.
        raw: (n,) one value per sample.
        units: (n,) the unit of each sample; a unit is left out as a whole.
        seed: of the random halves.

    Raises:
        NoContributions: too few units; or the aggregate fails on a part of the samples, is not smooth or is too slow.

    Cost: one aggregation for each unit, and `HALVES` aggregations of half the samples.
    """
    _, place, sizes = np.unique(np.asarray(units), return_inverse=True, return_counts=True)
    count = len(sizes)
    if count < FEWEST:
        raise NoContributions(f"{count} independent samples are too few; valid: at least {FEWEST}")
    started = time.perf_counter()
    total = _value(aggregate, list(raw))
    taken = (time.perf_counter() - started) * count
    if taken > PATIENCE:
        raise NoContributions(
            f"leaving out {count} times would take {taken:.0f} s; benchmark.blocks sets a smaller number"
        )
    leave_out = [
        _value(aggregate, [raw[i] for i in np.flatnonzero(place != unit).tolist()])
        for unit in range(count)
    ]
    deviations = (count - 1) * (total - np.array(leave_out))
    deviations -= deviations.mean()
    _check_fit(aggregate, raw, place, deviations, seed)
    share = len(raw) / count / sizes
    values = total + (deviations * share)[place]
    return Influence(values, float(deviations.std(ddof=1) / math.sqrt(count)))


def _check_fit(
    aggregate: Aggregate, raw: Sequence[Any], place: NDArray[np.intp], deviations: Array, seed: int
) -> None:
    """Raise NoContributions unless the contributions predict the aggregates of random halves of the units."""
    if not deviations.any():
        # No unit changes the aggregate, as if every answer is right: there is nothing to predict.
        return
    rng = np.random.default_rng(seed)
    half = len(deviations) // 2
    measured, predicted = [], []
    for _ in range(HALVES):
        chosen = np.zeros(len(deviations), dtype=bool)
        chosen[rng.permutation(len(deviations))[:half]] = True
        measured.append(_value(aggregate, [raw[i] for i in np.flatnonzero(chosen[place]).tolist()]))
        predicted.append(deviations[chosen].mean())
    spread, expected = float(np.std(measured)), float(np.std(predicted))
    if min(spread, expected) == 0:
        raise NoContributions("single samples do not predict how it varies")
    explained = float(np.corrcoef(measured, predicted)[0, 1]) ** 2
    if explained < EXPLAINED or not 1 / FACTOR < spread / expected < FACTOR:
        raise NoContributions(
            f"it does not vary as single samples predict (they explain {explained:.0%} of it, spread {spread:.3g} "
            f"against {expected:.3g})"
        )


def _value(aggregate: Aggregate, raw: list[Any]) -> float:
    try:
        value = aggregate(raw)
    except Exception as error:
        # A task's function, called with a subset of the samples, may raise anything.
        raise NoContributions(
            f"it fails on a part of the samples: {type(error).__name__}: {error}"
        ) from error
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(float(value)):
        raise NoContributions(f"of a part of the samples it is {value!r}")
    return float(value)


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

    Cost: one aggregation per unit for a metric that is not a mean (harness/evaluation/sample_contributions.py).
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
    with aggregation(task, metric) as aggregate:
        return is_mean(aggregate, list(raw.values()), values)


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
        with aggregation(task, metric) as aggregate:
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
def aggregation(task: Task, metric: str) -> Iterator[Aggregate]:
    """Yield a task's aggregation as a function of values only; the block drops its files and its printed text."""
    function = task.aggregation()[metric]
    # Without the guard of the run's scoring.
    function = getattr(function, "__wrapped__", function)
    text = io.StringIO()
    with TemporaryDirectory() as folder, redirect_stdout(text), redirect_stderr(text):
        if "args" in inspect.signature(function).parameters:
            function = partial(function, args=Namespace(output_path=folder))
        yield function


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
    # A filter follows the name of its metric.
    places = {name: name.partition(",")[0] for name in metrics}
    names = sorted(
        (name for name in metrics if places[name] in reported),
        key=lambda name: reported.index(places[name]),
    )
    scores, own_scores, units = Scores(), Scores(), dict[Key, dict[str, int]]()
    for name, share in ((name, shares[name]) for name in names if name in shares):
        # The error of a mean over samples assumes independence, which samples of one cluster lack.
        if share.stderr is not None and (share.how == MEAN or metrics[name]["stderr"] is None):
            metrics[name]["stderr"] = share.stderr
        for key, value in share.values.items():
            scores.setdefault(key, {})[name] = value
            if share.units[key] != key:
                units.setdefault(key, {})[name] = share.units[key][1]
        for key, value in share.sample_scores.items():
            own_scores.setdefault(key, {})[name] = value
    return ScoredRun(
        metrics={name: metrics[name] for name in names},
        scores=dict(sorted(scores.items())),
        units=units,
        how={
            name: {
                "how": shares[name].how,
                "samples": len(shares[name].values),
                "units": len(set(shares[name].units.values())),
                "note": shares[name].note,
            }
            for name in names
            if name in shares
        },
        values=values,
        sample_scores=own_scores,
        unparsed=unparsed,
    )


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
