"""Statistical units of a task's samples: clusters by a column, and blocks of many clusters.

Metrics may score a cluster as a whole, such as a question in all orders of its options, so that a limit cuts none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError, tell_once
from espalier.harness.evaluation.influence import assign_blocks
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, Cluster

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
    if not docs:
        return Partition({}, {})
    units = sorted(set(clusters.values()))
    block_numbers = dict(zip(units, assign_blocks(units, len(docs), benchmark.blocks), strict=True))
    leader: dict[int, int] = {}
    blocks = {doc: leader.setdefault(block_numbers[unit], doc) for doc, unit in clusters.items()}
    return Partition(clusters, blocks)


def check_cluster(tasks: Sequence[Task], cluster: Cluster | None) -> None:
    """Raise UserError if the column of clusters is not in the data of a task."""
    for task in tasks if cluster is not None else ():
        columns = getattr(task.eval_docs, "column_names", None)
        if columns is not None:
            _check_column(task.config.task, columns, cluster)


def limit_clusters(tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
    """Make tasks ask the first clusters that hold `benchmark.limit` samples, each as a whole, in the order of the data.

    Without a limit, or without clusters, tasks are unchanged.

    Raises:
        UserError: a sample has a value for its modulo that is not an integer.
    """
    if benchmark.limit is not None and benchmark.cluster is not None:
        for task in tasks:
            chosen = _first_clusters(task, benchmark.limit, benchmark.cluster)
            task.build_all_requests = partial(_ask, task, chosen)


def _first_clusters(task: Task, limit: int, cluster: Cluster) -> frozenset[int]:
    """Return the ids of the samples of the first clusters."""
    members: dict[Any, list[int]] = {}
    for doc_id, doc in enumerate(task.eval_docs_no_media):
        members.setdefault(_cluster(task.config.task, doc_id, doc, cluster), []).append(doc_id)
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


def _check_column(task: str, columns: Iterable[str], cluster: Cluster | None) -> None:
    if cluster is not None and cluster.column not in columns:
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
