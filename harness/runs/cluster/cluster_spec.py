"""The section `cluster` of a composed config becomes a ClusterSpec."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, NamedTuple

from espalier.harness.config.composer import Cell
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.settings import (
    By,
    Count,
    Line,
    Memory,
    Natural,
    OneOf,
    Positive,
    read_section,
    read_value,
    table,
)

PATH = CONF / "gpus.yaml"


class Span(NamedTuple):
    """The least and the largest value of a quantity."""

    low: float
    high: float

    def times(self, factor: float) -> Span:
        """Return the span of a multiple; `factor` is not negative."""
        return Span(self.low * factor, self.high * factor)

    @classmethod
    def total(cls, spans: Iterable[Span]) -> Span:
        """Return the sum of spans, from the sum of the least to that of the largest."""
        entries = list(spans)
        return cls(sum(span.low for span in entries), sum(span.high for span in entries))

    @classmethod
    def around(cls, spans: Iterable[Span]) -> Span:
        """Return the span from the least to the largest of several."""
        entries = list(spans)
        return cls(min(span.low for span in entries), max(span.high for span in entries))


@dataclass(frozen=True)
class GpuKind:
    """Peaks of a GPU.

    Attributes:
        flops: FLOP/s of dense half-precision products.
        bandwidth: bytes/s of its memory.
        memory: bytes.
    """

    flops: Positive
    bandwidth: Positive
    memory: Memory


@dataclass(frozen=True)
class Reached:
    """What runs reach, as spans of times over work.

    Attributes:
        products: seconds for each FLOP, times the peak.
        reads: seconds for each byte that a step reads, times the peak.
        launch: least seconds for a layer of one forward.
        loading: seconds for each byte of weights that is loaded.
        start: seconds of a job before that.
    """

    products: Span
    reads: Span
    launch: Span
    loading: Span
    start: Span


@cache
def gpu_kinds() -> Mapping[str, GpuKind]:
    """Return the GPUs of the file by name."""
    return read_kinds(str(PATH.name), _content()["kinds"])


@cache
def reached() -> Reached:
    """Return what runs reach, by the file."""
    content = _content()
    shares = {name: Span(*sorted(1 / share for share in content[name])) for name in SHARES}
    seconds = {name: Span(*sorted(content[name])) for name in ("launch", "start")}
    return Reached(**shares, **seconds)


#: Entries of the file that divide work.
SHARES = ("products", "reads", "loading")


def read_kinds(key: str, value: Any) -> dict[str, GpuKind]:
    """Return a table of GPUs.

    Raises:
        UserError: an entry lacks a peak or has another key.
    """
    return {
        name: read_section(GpuKind, f"{key}.{name}", peaks)
        for name, peaks in table(key, value).items()
    }


def _content() -> dict[str, Any]:
    return read_yaml(PATH)


#: Where cells are computed: in this process, in workers on this machine, in jobs of a queue.
LAUNCHERS = ("local", "joblib", "slurm")

_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _read_options(key: str, value: Any) -> dict[str, Any]:
    """Return options of sbatch; none of them can become a separate line in the batch script."""
    options = table(key, value)
    for name, option in options.items():
        if not _OPTION.fullmatch(name):
            raise UserError(
                f"{key}: {name!r} is not an option of sbatch; valid: letters, digits, - and _"
            )
        if isinstance(option, str):
            read_value(f"{key}.{name}", option, Line)
        elif option is not None and not isinstance(option, bool | int | float):
            raise UserError(f"{key}.{name}={option!r} must be a text, a number, true or null")
    return options


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """The resources that the user requests for a job; None leaves one to the model's size.

    Attributes:
        partition: of SLURM.
        gpus: of one machine.
        cpus: cores.
        memory: bytes of the machine.
        minutes: time limit.
    """

    partition: Line | None = None
    gpus: Natural | None = None
    cpus: Count | None = None
    memory: Memory | None = None
    minutes: Count | None = None

    @property
    def requested(self) -> dict[str, Any]:
        """The resources that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(ResourceRequest)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ClusterSpec(ResourceRequest):
    """How the cells of a command are computed.

    Attributes:
        name: one of LAUNCHERS.
        cells_per_job: most cells, all of one model, in a job.
        gpu_memory: bytes of one GPU.
        array_parallelism: jobs of an array that run at once.
        workers: jobs that run at once on this machine; None: as many as fit.
        wait: whether the command stays until its jobs have ended.
        poll: seconds between two looks at them.
        timeouts: how often a job that reached its time limit is queued again.
        grace: seconds before the limit at which the job is warned.
        options: further options of sbatch.
        gpu_kinds: GPUs of the estimate in addition to those of conf/gpus.yaml.
        answer_tokens: tokens of an answer that the estimate counts with, by benchmark.
    """

    name: Annotated[str, OneOf(LAUNCHERS)] = "local"
    cells_per_job: Count = 16
    gpu_memory: Memory = 80 * 2**30
    array_parallelism: Count = 32
    workers: Count | None = None
    wait: bool = True
    poll: Positive = 5.0
    timeouts: Natural = 20
    grace: Count = 60
    options: Annotated[Mapping[str, Any], By(_read_options)] = field(default_factory=dict)
    gpu_kinds: Annotated[Mapping[str, GpuKind], By(read_kinds)] | None = None
    answer_tokens: Mapping[str, Count] | None = None

    @property
    def estimated_gpus(self) -> dict[str, GpuKind]:
        """The GPUs that hours are estimated for, by name."""
        return {**gpu_kinds(), **(self.gpu_kinds or {})}


def cluster_of(cells: Sequence[Cell]) -> ClusterSpec:
    """Return the cluster settings that the cells of a command share; cells inside a job have none and run in place.

    Raises:
        UserError: a value is wrong, or cells differ in it.
    """
    sections = [cell.get("cluster") for cell in cells]
    for section in sections[1:]:
        if section != sections[0]:
            raise UserError(
                "cluster: cells of one sweep differ in where they run; valid: one value of each cluster.* key"
            )
    return (
        ClusterSpec() if sections[0] is None else read_section(ClusterSpec, "cluster", sections[0])
    )
