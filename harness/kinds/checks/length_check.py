"""Check of the positions and the memory that requested lengths need, before the model is loaded."""

from __future__ import annotations

import json
from typing import Any

import torch

from espalier.harness.cost.flops import quadratic
from espalier.harness.cost.free_memory import DeviceMemory
from espalier.harness.errors import Refused, foreign
from espalier.harness.specs.hub_cache import cached_file
from espalier.harness.specs.run_spec import ModelSpec, RunSpec
from espalier.harness.store.files.digests import read_bytes

GIB = 2**30


def check_lengths(spec: RunSpec) -> None:
    """Refuse prompts of a given length (benchmark.prompt_tokens) that exceed the positions or the memory.

    Raises:
        Refused: the line has the requested and the available number.
    """
    tokens = spec.benchmark.prompt_tokens
    if tokens is None:
        return
    key, limit = f"benchmark.prompt_tokens={tokens}", positions_of(spec.model)
    if limit is not None and tokens >= limit:
        advice = ", or more of model.architecture.text.max_position_embeddings"
        raise Refused(
            f"{key}: model={spec.model.name!r} has {limit} positions; valid: fewer than {limit}"
            + (advice if spec.model.weights == "random" else "")
        )
    if spec.model.device_map is not None:
        return  # weights spread over the available memory
    if spec.model.device.startswith("cuda") and not torch.cuda.is_available():
        return  # of the machine of a job, which checks it
    memory = DeviceMemory(spec.model.device)
    needed, room = least_bytes(spec, tokens), memory.reachable()
    if needed > room:
        raise Refused(
            f"{key}: weights and caches of {spec.engine.batch_size} rows take at least {needed / GIB:.1f} GiB, "
            f"{spec.model.device} has {room / GIB:.1f} GiB; valid: shorter prompts, or a smaller engine.batch_size"
        )


def check_places(spec: RunSpec, places: int, key: str = "max_new_tokens") -> None:
    """Refuse an answer to be denoised that exceeds the model's positions after one image.

    Args:
        spec: the run.
        places: positions of the answer, at least.
        key: the setting that gives them.

    Raises:
        Refused: the line has the requested and the available number.
    """
    image, limit = spec.model.facts.visual_tokens, positions_of(spec.model)
    if limit is not None and image + places >= limit:
        raise Refused(
            f"generation.{key}={places}: model={spec.model.name!r} has {limit} positions, {image} of them "
            f"for an image; valid: fewer than {max(limit - image, 1)}"
        )


def positions_of(model: ModelSpec) -> int | None:
    """Return the positions of the text stack by its configuration; None where it has none."""
    table: Any = model.architecture
    if model.weights != "random":
        file = (
            cached_file(model, "config.json") if model.path is None else model.path / "config.json"
        )
        with foreign(f"model={model.name}: {str(file)!r} cannot be read", "the original file"):
            table = {} if file is None else json.loads(read_bytes(file))
            return _positions(table)
    return _positions(table)


def _positions(table: Any) -> int | None:
    for part in (table.get("text_config"), table.get("text"), table):
        if part and "max_position_embeddings" in part:
            return int(part["max_position_embeddings"])
    return None


def least_bytes(spec: RunSpec, tokens: int) -> int:
    """Return the bytes of decoder, head and caches of a batch with full prompts, a lower bound of the memory needed."""
    rows, positions = spec.engine.batch_size, tokens + (spec.benchmark.new_tokens or 0)
    assert rows != "auto"  # such benchmarks need a number (harness/config/build_spec.py)
    return decoder_bytes(spec.model) + rows * positions * entry_bytes(spec.model)


def decoder_bytes(model: ModelSpec) -> int:
    """Return the bytes of the weights of decoder and head."""
    text = model.facts.text
    # A token takes two FLOPs for every weight of a layer.
    weights = text.layers * int(quadratic(text)[0]) // 2 + model.facts.vocabulary * text.hidden
    return int(getattr(torch, model.dtype).itemsize) * weights


def entry_bytes(model: ModelSpec) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    return int(getattr(torch, model.dtype).itemsize) * model.facts.text.entry_values
