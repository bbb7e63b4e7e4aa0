"""The section `cluster` of a composed config becomes a ClusterSpec."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from espalier.harness.config.cell_config import Cell
from espalier.harness.errors import UserError
from espalier.harness.specs import value_checks as fields

#: What carries out the cells: this process, workers on this machine, a queue.
LAUNCHERS = ("local", "joblib", "slurm")

_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_whole = partial(fields.integer, at_least=0)
_some = partial(fields.integer, at_least=1)

#: What a job takes of a machine, with what checks a value.
RESOURCES: Mapping[str, Callable[[str, Any], Any]] = {
    "partition": fields.line,
    "gpus": _whole,
    "cpus": _some,
    "memory": fields.room,
    "minutes": _some,
}


@dataclass(frozen=True)
class ClusterSpec:
    """How the cells of a command are carried out.

    Attributes:
        name: one of LAUNCHERS.
        cells_per_job: cells of one model that a job has at most.
        asked: of RESOURCES, what the user sets for every job.
        gpu_memory: bytes of one GPU.
        array_parallelism: jobs of an array that run at once.
        workers: jobs that run at once on this machine; None: as many as it has room for.
        wait: whether the command stays until its jobs have ended.
        poll: seconds between two looks at them.
        timeouts: how often a job that ran into its time limit is queued again.
        grace: seconds before the limit at which it is told.
        options: further options of sbatch.
        flops_per_second: assumed rate of one GPU.
    """

    name: str = "local"
    cells_per_job: int = 16
    asked: Mapping[str, Any] = field(default_factory=dict)
    gpu_memory: int = 80 * 2**30
    array_parallelism: int = 32
    workers: int | None = None
    wait: bool = True
    poll: float = 5.0
    timeouts: int = 20
    grace: int = 60
    options: Mapping[str, Any] = field(default_factory=dict)
    flops_per_second: float = 2e13


def cluster_of(cells: Sequence[Cell]) -> ClusterSpec:
    """Return what the cells of a command say of the cluster; cells of a job, which say nothing, run where they are.

    Raises:
        UserError: a value is wrong, or cells differ in it.
    """
    found = [cell.get("cluster") for cell in cells]
    for one in found[1:]:
        if one != found[0]:
            raise UserError(
                "cluster: cells of one sweep differ in where they run; valid: one value of each cluster.* key"
            )
    return ClusterSpec() if found[0] is None else _spec(fields.table("cluster", found[0]))


def asked_of(key: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources that a table asks for; a null asks for nothing.

    Args:
        key: what error lines call the table.
        part: the table.
    """
    fields.only_some(key, part, RESOURCES)
    return {
        name: RESOURCES[name](f"{key}.{name}", value)
        for name, value in part.items()
        if value is not None
    }


def _options(part: dict[str, Any]) -> dict[str, Any]:
    """Return options of sbatch, none of which can become a line of its own in the batch script."""
    for name, value in part.items():
        if not _OPTION.fullmatch(name):
            raise UserError(
                f"cluster.options: {name!r} is no option of sbatch; valid: letters, digits, - and _"
            )
        if isinstance(value, str):
            fields.line(f"cluster.options.{name}", value)
        elif value is not None and not isinstance(value, bool | int | float):
            raise UserError(
                f"cluster.options.{name}={value!r} must be a text, a number, true or null"
            )
    return part


def _spec(part: Mapping[str, Any]) -> ClusterSpec:
    names = [name for name in ClusterSpec.__dataclass_fields__ if name != "asked"]
    fields.only_known("cluster", part, (*names, *RESOURCES))
    resources = {name: part[name] for name in RESOURCES}
    return ClusterSpec(
        name=fields.choice("cluster", part["name"], LAUNCHERS),
        cells_per_job=_some("cluster.cells_per_job", part["cells_per_job"]),
        asked=asked_of("cluster", resources),
        gpu_memory=fields.room("cluster.gpu_memory", part["gpu_memory"]),
        array_parallelism=_some("cluster.array_parallelism", part["array_parallelism"]),
        workers=fields.optional_integer("cluster.workers", part["workers"], at_least=1),
        wait=fields.flag("cluster.wait", part["wait"]),
        poll=fields.positive("cluster.poll", part["poll"]),
        timeouts=_whole("cluster.timeouts", part["timeouts"]),
        grace=_some("cluster.grace", part["grace"]),
        options=_options(fields.table("cluster.options", part["options"])),
        flops_per_second=fields.positive("cluster.flops_per_second", part["flops_per_second"]),
    )
