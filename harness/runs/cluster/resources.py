"""The section `cluster` of a config, and the resources of a job: requested, else by the size of its models.

The size is the number of parameters by the model's facts, known before anything is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, NamedTuple

from espalier.harness.config.composer import Cell
from espalier.harness.config.draft_section import reserve_draft_card
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.cost.facts import ModelFacts, StackFacts
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
    defaults,
    read_section,
    read_value,
    table,
)
from espalier.harness.specs.run_spec import ModelSpec, RunSpec

PATH = CONF / "gpus.yaml"


class Span(NamedTuple):
    """The least and the largest value of a quantity."""

    low: float
    high: float

    def times(self, factor: float) -> Span:
        """Return the span of a multiple; `factor` is not negative."""
        return Span(self.low * factor, self.high * factor)

    def at(self, place: float) -> float:
        """Return the value at a place between the ends, -1 and 1; 0 is the geometric middle."""
        return math.sqrt(self.low * self.high) * math.pow(self.high / self.low, place / 2)

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
        expert_launch: the same, of a layer with experts.
        loading: seconds for each byte of weights that is loaded.
        start: seconds of a job before that.
        acceptance: share of drafted tokens that the target accepts.
    """

    products: Span
    reads: Span
    launch: Span
    expert_launch: Span
    loading: Span
    start: Span
    acceptance: Span

    def launch_of(self, stack: StackFacts) -> Span:
        """Return the least seconds for a layer of a stack."""
        return self.expert_launch if stack.experts else self.launch


@cache
def gpu_kinds() -> Mapping[str, GpuKind]:
    """Return the GPUs of the file by name."""
    return read_kinds(PATH.name, read_yaml(PATH)["kinds"])


@cache
def reached() -> Reached:
    """Return what runs reach, by the file, which has shares of peaks, speeds and seconds."""
    content = read_yaml(PATH)
    divided = ("products", "reads", "loading")
    shares = {name: Span(*sorted(1 / share for share in content[name])) for name in divided}
    spans = {
        part.name: Span(*sorted(content[part.name]))
        for part in fields(Reached)
        if part.name not in divided
    }
    return Reached(**shares, **spans)


def read_kinds(key: str, value: Any) -> dict[str, GpuKind]:
    """Return a table of GPUs.

    Raises:
        UserError: an entry lacks a peak or has another key.
    """
    return {
        name: read_section(GpuKind, f"{key}.{name}", peaks)
        for name, peaks in table(key, value).items()
    }


#: Where cells are computed: in this process, in workers on this machine, in jobs of a queue.
LAUNCHERS = ("local", "joblib", "slurm")

#: Where `cluster=joblib` runs jobs: in processes of this machine, or on the workers of a cluster.
BACKENDS = ("threading", "dask", "ray")

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
        workers: jobs of joblib that run at once; None: as many as fit.
        backend: one of BACKENDS.
        address: of the cluster; None: the environment names it.
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
    backend: Annotated[str, OneOf(BACKENDS)] = "threading"
    address: Line | None = None
    wait: bool = True
    poll: Positive = 5.0
    timeouts: Natural = 20
    grace: Count = 60
    options: Annotated[Mapping[str, Any], By(_read_options)] = field(default_factory=dict)
    gpu_kinds: Annotated[Mapping[str, GpuKind], By(read_kinds)] | None = None
    answer_tokens: Mapping[str, Count] | None = None

    def __post_init__(self) -> None:
        """Raise UserError if the command would not wait for workers that end with it."""
        if self.name == "joblib" and not self.wait:
            raise UserError(
                "cluster.wait=False: the jobs of cluster=joblib end with this command; valid: true, or cluster=slurm"
            )

    @property
    def on_this_machine(self) -> bool:
        """Whether jobs are processes of this machine."""
        return self.name == "joblib" and self.backend == "threading"

    @property
    def estimated_gpus(self) -> dict[str, GpuKind]:
        """The GPUs that hours are estimated for, by name."""
        return {**gpu_kinds(), **(self.gpu_kinds or {})}


def cluster_of(cells: Sequence[Cell]) -> ClusterSpec:
    """Return the cluster settings that the cells of a command share; cells inside a job have none and run in place.

    Raises:
        UserError: a value is wrong, or cells differ in it.
    """
    first, *further_sections = (cell.get("cluster") for cell in cells)
    if any(section != first for section in further_sections):
        raise UserError(
            "cluster: cells of one sweep differ in where they run; valid: one value of each cluster.* key"
        )
    return ClusterSpec() if first is None else read_section(ClusterSpec, "cluster", first)


#: Models up to this number of parameters run on a CPU unless the config requests a GPU.
WITHOUT_GPU = 10**8

#: Share of a GPU that weights may take: activations, caches and libraries need the rest.
SHARE = 0.75

#: Cores without GPUs, cores per GPU, and bytes in addition to those for weights.
CPUS, CPUS_PER_GPU, BASE_MEMORY = 2, 4, 4 * 2**30

#: Default time limit of a job in minutes; remaining cells continue in the next turn.
MINUTES = 240

#: Bytes per parameter by precision.
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Resources:
    """Resources of one job.

    Attributes:
        gpus: of one machine.
        cpus: cores.
        memory: bytes of the machine.
        minutes: time limit.
        partition: of SLURM; None: its default.
    """

    gpus: int
    cpus: int
    memory: int
    minutes: int = MINUTES
    partition: str | None = None


def resources_of(config: Cell, spec: RunSpec, cluster: ClusterSpec) -> Resources:
    """Return the resources of a job with this cell.

    Raises:
        UserError: `model.resources` has an invalid entry.
    """
    key = "model.resources"
    part = defaults(ResourceRequest) | table(key, config["model"]["resources"])
    request = read_section(ResourceRequest, key, part)
    # At least what the model takes, and its draft, which has a GPU of its own.
    models = models_of(spec)
    gpus = sum(gpus_for(model, cluster.gpu_memory) for model in models)
    minimum = {
        "gpus": gpus,
        "cpus": CPUS_PER_GPU * gpus or CPUS,
        "memory": BASE_MEMORY + 2 * sum(map(weight_bytes, models)),
    }
    return Resources(**{**minimum, **request.requested, **cluster.requested})


def on_its_machine(config: Cell, spec: RunSpec, gpus: int) -> RunSpec:
    """Return the spec with `model.device=auto` resolved for the machine of the job, which may differ from this one."""
    device = "cuda" if gpus else "cpu"
    model, method = spec.model, spec.method
    if config["model"]["device"] == "auto":
        model = replace(model, device=device)
    options = config["method"].get("draft_options") or {}
    if method.draft is not None and options.get("device", "auto") == "auto":
        method = replace(method, draft=replace(method.draft, device=device))
    return replace(spec, model=reserve_draft_card(model, method.draft), method=method)


def gpus_for(model: ModelSpec, gpu_memory: int) -> int:
    """Return how many GPUs the weights of a model need; 0 for one that runs on a CPU."""
    if parameters(model) <= WITHOUT_GPU:
        return 0
    return math.ceil(weight_bytes(model) / (SHARE * gpu_memory))


def models_of(spec: RunSpec) -> list[ModelSpec]:
    """Return the models that a run loads: its own, and its draft where that is another."""
    draft = spec.method.draft
    return [spec.model] if draft is None or draft == spec.model else [spec.model, draft]


def parameters(model: ModelSpec) -> int:
    """Return the entries of all matrices, without norms, biases, patch embeddings and positions (about a percent).

    Embedding and output head both count, though some models share them. All experts count where the model's file
    states their width; the facts have those of one token.
    """
    facts = model.facts
    towers = [facts.tower] + ([facts.stem] if facts.stem is not None else [])
    projector = facts.projector_entries * (1 + len(facts.deepstack))
    words = 2 * facts.vocabulary * facts.text.hidden
    text, stated = facts.text, model.architecture.get("text", {})
    width = stated.get("moe_intermediate_size", 0)
    experts = stated.get("num_experts", stated.get("n_routed_experts", text.experts))
    active = stated.get("num_experts_per_tok", stated.get("top_k_experts", experts))
    layers = text.layers - (text.first_intermediate is not None)
    # Of the experts that a token does not go through.
    idle = layers * int(experts - active) * 3 * text.hidden * int(width)
    stacks = sum(map(_stack, (text, *towers)))
    return stacks + idle + _join(facts) + projector + words


def weight_bytes(model: ModelSpec) -> int:
    """Return the bytes of these parameters in the model's precision."""
    return parameters(model) * BYTES[model.dtype]


def _join(facts: ModelFacts) -> int:
    """Return the parameters of the step that joins tokens between stem and tower."""
    if facts.stem is None or not facts.stem_joins:
        return 0
    return 4 * facts.stem.hidden**2 + facts.join_entries


def _stack(stack: StackFacts) -> int:
    """Return the parameters of all layers of a stack."""
    parts = map(stack.heads_of, range(stack.layers))
    attention = stack.hidden * sum(
        part.head_dim * (2 * stack.heads + part.kv_heads * (2 if part is stack else 1))
        for part in parts
    )
    first = stack.intermediate if stack.first_intermediate is None else stack.first_intermediate
    widths = first + (stack.layers - 1) * stack.intermediate
    mlp = (3 if stack.gated else 2) * stack.hidden * widths
    return attention + mlp
