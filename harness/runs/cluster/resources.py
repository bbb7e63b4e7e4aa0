"""What a job takes of a machine: what the user asks for, else what the model's file does, else what its size needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from espalier.harness.config.build_spec import reserve_draft_card
from espalier.harness.config.cell_config import Cell
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.parameter_count import parameters, weight_bytes
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec, ResourceRequest
from espalier.harness.settings import defaults, read_section, table
from espalier.harness.specs.run_spec import ModelSpec, RunSpec

#: Models up to this size run on a CPU, where nobody asks for more.
WITHOUT_GPU = 10**8

#: Of a GPU, weights may take this share: activations, caches and what the libraries hold need the rest.
SHARE = 0.75

#: Cores and bytes of a job beside those that its GPUs and weights bring.
CPUS, CPUS_PER_GPU, BASE_MEMORY = 2, 4, 4 * 2**30

#: Minutes of a job that nobody limits; what is left then goes on in the next one.
MINUTES = 240


@dataclass(frozen=True)
class Resources:
    """What one job takes.

    Attributes:
        gpus: of one machine.
        cpus: cores.
        memory: bytes of the machine.
        minutes: until it is ended.
        partition: of SLURM; None: its default.
    """

    gpus: int
    cpus: int
    memory: int
    minutes: int = MINUTES
    partition: str | None = None


def resources_of(config: Cell, spec: RunSpec, cluster: ClusterSpec) -> Resources:
    """Return what a job with this cell takes.

    Raises:
        UserError: `model.resources` asks for what there is not.
    """
    key = "model.resources"
    part = defaults(ResourceRequest) | table(key, config["model"]["resources"])
    request = read_section(ResourceRequest, key, part)
    return Resources(**{**_needed(spec, cluster), **request.requested, **cluster.requested})


def on_its_machine(config: Cell, spec: RunSpec, gpus: int) -> RunSpec:
    """Return the spec with `model.device=auto` as the machine of the job will take it, which this one may not be."""
    device = "cuda" if gpus else "cpu"
    model, method = spec.model, spec.method
    if config["model"]["device"] == "auto":
        model = replace(model, device=device)
    options = config["method"].get("draft_options") or {}
    if method.draft is not None and options.get("device", "auto") == "auto":
        method = replace(method, draft=replace(method.draft, device=device))
    return replace(spec, model=reserve_draft_card(model, method.draft), method=method)


def gpus_for(facts: ModelFacts, dtype: str, gpu_memory: int) -> int:
    """Return how many GPUs the weights of a model need; none for one that a CPU runs."""
    if parameters(facts) <= WITHOUT_GPU:
        return 0
    return math.ceil(weight_bytes(facts, dtype) / (SHARE * gpu_memory))


def _needed(spec: RunSpec, cluster: ClusterSpec) -> Mapping[str, Any]:
    """Return the least by the sizes of the model and of the one that drafts for it, which lives on a GPU of its own."""
    models: list[ModelSpec] = [spec.model]
    if spec.method.draft is not None and spec.method.draft != spec.model:
        models.append(spec.method.draft)
    gpus = sum(gpus_for(one.facts, one.dtype, cluster.gpu_memory) for one in models)
    weights = sum(weight_bytes(one.facts, one.dtype) for one in models)
    return {
        "gpus": gpus,
        "cpus": CPUS_PER_GPU * gpus or CPUS,
        "memory": BASE_MEMORY + 2 * weights,
    }
