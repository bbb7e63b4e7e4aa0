"""What the nodes of a cluster have, as sinfo tells it, and whether a job can ever fit on one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.harness.errors import UserError
from espalier.harness.runs.cluster.resources import Resources

_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


@dataclass(frozen=True)
class Nodes:
    """Nodes of one partition that are alike.

    Attributes:
        partition: its name.
        usual: whether jobs go there that name none.
        gpus: of a node, of all types.
        cpus: of a node.
        memory: MiB of a node.
        minutes: time limit of the partition.
    """

    partition: str
    usual: bool
    gpus: int
    cpus: int
    memory: int
    minutes: float


def nodes_of(text: str) -> list[Nodes]:
    """Read what `sinfo -h -e -o "%P|%G|%c|%m|%l"` prints."""
    found = []
    for line in text.splitlines():
        partition, gres, cpus, memory, limit = line.split("|")
        found.append(
            Nodes(
                partition.rstrip("*"),
                partition.endswith("*"),
                sum(map(int, _GPUS.findall(gres))),
                int(cpus.rstrip("+")),
                int(memory.rstrip("+")),
                _minutes(limit),
            )
        )
    return found


def check_request(asked: Resources, model: str, nodes: Sequence[Nodes]) -> None:
    """Raise UserError where no node has what a job takes: it would be refused, or wait for ever."""
    names = sorted({one.partition for one in nodes})
    if asked.partition is not None and asked.partition not in names:
        raise UserError(
            f"cluster.partition={asked.partition!r} (model={model}): SLURM has no such partition; valid: "
            f"{', '.join(names) or 'none, it lists no node'}"
        )
    here = [
        one
        for one in nodes
        if (one.usual if asked.partition is None else one.partition == asked.partition)
    ]
    if not here:
        raise UserError(
            f"cluster.partition=None: SLURM has no default partition; valid: {', '.join(names)}"
        )
    place = f"partition {here[0].partition}"
    wanted = {
        "gpus": (asked.gpus, max(one.gpus for one in here), ""),
        "cpus": (asked.cpus, max(one.cpus for one in here), ""),
        "memory": (math.ceil(asked.memory / 2**20), max(one.memory for one in here), "MiB"),
        "minutes": (asked.minutes, max(one.minutes for one in here), ""),
    }
    for name, (value, most, unit) in wanted.items():
        if value > most:
            raise UserError(
                f"cluster.{name}={value}{unit} (model={model}): no node of {place} gives as much; valid: at most "
                f"{most:g}{unit}"
            )


def _minutes(limit: str) -> float:
    """Return the minutes of a time limit: `infinite`, `30:00`, `12:00:00` or `7-00:00:00`."""
    if limit in ("infinite", "UNLIMITED", "n/a"):
        return math.inf
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60
