"""Checks of a model before it is loaded: family, precision, files, values of the weights, and length of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from espalier.harness.config.checkpoint_names import GROUP
from espalier.harness.config.group_lists import choices, read_choice
from espalier.harness.config.model_section import model_spec
from espalier.harness.cost.flops import quadratic
from espalier.harness.cost.memory import DeviceMemory
from espalier.harness.errors import Refused, UserError, foreign, unknown_name
from espalier.harness.models.checkpoint_files import check_checkpoint, check_shards
from espalier.harness.models.families import ADAPTERS, own_family
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.hub_cache import cached_file, require_cached
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec, RunSpec
from espalier.harness.store.files.digests import Digests, read_bytes

#: Bytes of weights up to which `model.check_weights=auto` reads the values: seconds.
LARGEST = 2 * 2**30
#: Values that are checked at once.
CHUNK = 2**24

GIB = 2**30


def check_model(
    model: ModelSpec, offline: bool, digests: Digests, tasks: tuple[str, ...] = ()
) -> None:
    """Raise UserError unless the model's family, precision, settings and checkpoint allow it to be loaded.

    A checkpoint of the hub is downloaded, unless `offline`. `tasks` are kind and name of the benchmark.

    Cost: one read of weight files with a checksum, or with values to check (`model.check_weights`); of others the
    headers.
    """
    if model.in_memory is not None:
        return  # checked when it was wrapped
    if model.adapter not in ADAPTERS:
        raise unknown_name("model.adapter", model.adapter, ADAPTERS.names())
    if model.adapter not in ADAPTERS.names():
        own_family(model.adapter)
    check_precision(model)
    settings = _family_settings(model), model.name, model.prompt.name, model.weights, tasks
    digests.once(repr(settings), lambda: _check_settings(model, tasks))
    if model.weights == "random":
        refuse("random weights", {"model": model})
        return
    if model.path is not None:
        _once(digests, model, model.path, partial(check_checkpoint, model.path, digests))
        return
    folder = require_cached(model.name, model.hub or "", model.revision, offline)
    if folder is None:
        # Imports the hub's library.
        from espalier.harness.specs.hub_files import checkpoint_folder

        folder = checkpoint_folder(model.hub or "", model.revision)
    _once(digests, model, folder, partial(check_shards, folder, f"model.hub={model.hub!r}"))


def _check_settings(model: ModelSpec, tasks: tuple[str, ...]) -> None:
    """Raise UserError for settings that the model's family does not take.

    Those of its file in conf/model are valid (tests/models/test_shipped_settings.py): a dry run need not import the
    family's code for them, which takes seconds.
    """
    if model.name in choices(GROUP):
        shipped = read_choice(GROUP, model.name)
        changes = {"prompt": model.prompt.name, "weights": model.weights}
        # The user may have a prompt set that the file has not.
        with suppress(UserError):
            if _family_settings(model_spec(shipped | changes, tasks)) == _family_settings(model):
                return
    family = ADAPTERS.load(model.adapter)
    family.check_settings(model)
    # The checkpoint's template itself is not here yet.
    conversation = None if model.conversation == CHECKPOINT else model.conversation
    if conversation is not None or model.prompt.join is not None:
        family.format(conversation, model.prompt.join)


def _family_settings(model: ModelSpec) -> tuple[Any, ...]:
    """Return the family, and all that its `check_settings` and `format` read."""
    prompt = model.conversation, model.prompt.join
    return model.adapter, model.processor, model.architecture, model.attention, *prompt


def _once(
    digests: Digests, model: ModelSpec, folder: Path, check_files: Callable[[], None]
) -> None:
    """Check the files of a checkpoint and their values, once a command."""

    def check() -> None:
        check_files()
        check_finite(model, folder)

    digests.once(("checked", folder, model.dtype, model.check_weights), check)


def check_precision(model: Any) -> None:
    """Refuse a precision or an attention of a ModelSpec that the device does not support, or only emulates."""
    # A device map uses the visible cards, whatever `device` is.
    cuda = torch.cuda.is_available()
    on_cpu = model.device == "cpu" and (model.device_map is None or not cuda)
    # Without a GPU here the run is meant for a cluster's job, which checks its own machine.
    lacks_bfloat16 = cuda and not on_cpu and not torch.cuda.is_bf16_supported()
    refuse(
        "precision",
        {"model": model},
        on_cpu=on_cpu,
        lacks_bfloat16=lacks_bfloat16,
        gpu=torch.cuda.get_device_name,
    )


def check_finite(model: ModelSpec, folder: Path) -> None:
    """Raise UserError if a tensor of a checkpoint holds values outside the run's precision.

    Cost: one read of the weights, a part of a tensor at a time, none with `model.check_weights=false`.
    """
    files = sorted(folder.glob("*.safetensors"))
    wanted = model.check_weights
    if wanted == "auto":
        wanted = sum(file.stat().st_size for file in files) <= LARGEST
    if not wanted:
        return
    names = [
        name
        for file in files
        for name in _unbounded(file, file.stat().st_size, file.stat().st_mtime_ns, model.dtype)
    ]
    if names:
        more_names = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UserError(
            f"model={model.name}: tensor {names[0]!r}{more_names} of {str(folder)!r} holds NaN, infinite values or "
            f"values beyond model.dtype={model.dtype}; valid: the original files, a wider dtype, or "
            "model.check_weights=false"
        )


@cache  # a sweep checks every cell; size and time of change stand for the content
def _unbounded(file: Path, _size: int, _changed: int, dtype: str) -> tuple[str, ...]:
    """Return the names of the tensors with such values."""
    largest = torch.finfo(getattr(torch, dtype)).max
    broken = (SafetensorError, RuntimeError)
    with (
        foreign(f"model.path: weight file {str(file)!r} is damaged", "the original file", broken),
        safe_open(file, framework="pt") as tensors,
    ):
        return tuple(
            name
            for name in tensors.keys()  # noqa: SIM118 - no mapping
            if not all(
                # Comparisons with NaN are false.
                not part.is_floating_point() or bool((part.float().abs() <= largest).all())
                for part in _parts(tensors, name)
            )
        )


def _parts(tensors: safe_open, name: str) -> Iterator[Tensor]:
    """Yield a tensor in parts along its first axis."""
    stored = tensors.get_slice(name)
    shape = stored.get_shape()
    if not shape or 0 in shape:
        yield tensors.get_tensor(name)
        return
    row = torch.Size(shape[1:]).numel()
    step = max(1, CHUNK // row)
    for first in range(0, shape[0], step):
        yield stored[first : first + step]


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
