"""Resources of a job: as the user requests, else as the model's config states, else by the model's size.

The size is the number of parameters by the model's facts, known before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from espalier.harness.config.build_spec import reserve_draft_card
from espalier.harness.config.composer import Cell
from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec, ResourceRequest
from espalier.harness.settings import defaults, read_section, table
from espalier.harness.specs.run_spec import ModelSpec, RunSpec

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
    return Resources(**{**_minimum(spec, cluster), **request.requested, **cluster.requested})


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


def _minimum(spec: RunSpec, cluster: ClusterSpec) -> Mapping[str, Any]:
    """Return the minimum by the sizes of the model and of its draft, which has a GPU of its own."""
    models = models_of(spec)
    gpus = sum(gpus_for(model, cluster.gpu_memory) for model in models)
    weights = sum(map(weight_bytes, models))
    return {
        "gpus": gpus,
        "cpus": CPUS_PER_GPU * gpus or CPUS,
        "memory": BASE_MEMORY + 2 * weights,
    }


def parameters(model: ModelSpec) -> int:
    """Return the entries of all matrices, without norms, biases, patch embeddings and positions (about a percent).

    Embedding and output head both count, though some models share them. All experts count where the model's file
    states their width; the facts have those of one token.
    """
    facts = model.facts
    towers = [facts.tower] + ([facts.stem] if facts.stem is not None else [])
    projector = facts.projector_entries * (1 + len(facts.deepstack))
    words = 2 * facts.vocabulary * facts.text.hidden
    stacks = sum(map(_stack, (facts.text, *towers))) + _idle_experts(model)
    return stacks + _join(facts) + projector + words


def weight_bytes(model: ModelSpec) -> int:
    """Return the bytes of these parameters in the model's precision."""
    return parameters(model) * BYTES[model.dtype]


def _idle_experts(model: ModelSpec) -> int:
    """Return the parameters of the experts that a token does not go through."""
    text, stated = model.facts.text, model.architecture.get("text", {})
    width = stated.get("moe_intermediate_size", 0)
    experts = stated.get("num_experts", stated.get("n_routed_experts", text.experts))
    active = stated.get("num_experts_per_tok", stated.get("top_k_experts", experts))
    layers = text.layers - (text.first_intermediate is not None)
    return layers * int(experts - active) * 3 * text.hidden * int(width)


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
