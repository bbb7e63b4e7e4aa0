"""Statistical units of a task's samples: clusters by a column, and blocks of many clusters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
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
