"""Checks of a model before it is loaded: family, precision, settings, files, and values of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from espalier.harness.errors import UserError, foreign, unknown_name
from espalier.harness.models.checkpoint_files import check_checkpoint, check_shards
from espalier.harness.models.families import ADAPTERS, own_family
from espalier.harness.specs.hub_cache import require_cached
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec
from espalier.harness.store.files.digests import Digests

#: Bytes of weights up to which `model.check_weights=auto` reads the values: seconds.
LARGEST = 2 * 2**30
#: Values that are checked at once.
CHUNK = 2**24


def check_model(model: ModelSpec, offline: bool, digests: Digests) -> None:
    """Raise UserError unless the model's family, precision, settings and checkpoint allow it to be loaded.

    Cost: one read of weight files with a checksum, or with values to check (`model.check_weights`); of others the
    headers.
    """
    if model.in_memory is not None:
        return  # checked when it was wrapped
    if model.adapter not in ADAPTERS:
        raise unknown_name("model.adapter", model.adapter, ADAPTERS.names())
    if model.adapter not in ADAPTERS.names():
        own_family(model.adapter)
    _check_precision(model)
    if model.processor:
        # Imports the family's code, which takes seconds; most models state settings, and a run needs it anyway.
        ADAPTERS.load(model.adapter).check_settings(model)
    # The checkpoint's template itself is not here yet; nor is the family's code imported for it.
    conversation = None if model.conversation == CHECKPOINT else model.conversation
    if conversation is not None or model.prompt.join is not None:
        ADAPTERS.load(model.adapter).format(conversation, model.prompt.join)
    if model.weights == "random":
        if not model.architecture:
            raise UserError(
                f"model.weights='random': model={model.name!r} states no model.architecture to build; valid: trained"
            )
        return
    if model.path is not None:
        check_checkpoint(model.path, digests)
        check_finite(model, model.path)
        return
    folder = require_cached(model.name, model.hub or "", model.revision, offline)
    if folder is not None:
        if offline:  # missing files are downloaded otherwise
            check_shards(folder, f"model.hub={model.hub!r}")
        check_finite(model, folder)


def _check_precision(model: ModelSpec) -> None:
    """Refuse a precision or an attention that the device does not support, or only emulates."""
    # A device map uses the visible cards, whatever `device` is.
    cuda = torch.cuda.is_available()
    spread = model.device_map is not None and cuda
    on_cpu = model.device == "cpu" and not spread
    if on_cpu and model.dtype == "float16":
        raise UserError(
            "model.dtype='float16' on the CPU: half precision is slow and overflows there; valid: float32, bfloat16"
        )
    if model.attention == "flash_attention_2" and (on_cpu or model.dtype == "float32"):
        raise UserError(
            f"model.attention='flash_attention_2' needs a GPU and half precision, not {model.dtype} on "
            f"{model.device}; valid: sdpa, eager"
        )
    if model.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        raise UserError(
            "model.attention='flash_attention_2' needs the package flash-attn, which is not installed; "
            "valid: sdpa, eager"
        )
    # Without a GPU here the run is meant for a cluster's job, which checks its own machine.
    if model.dtype == "bfloat16" and not on_cpu and cuda and not torch.cuda.is_bf16_supported():
        raise UserError(
            f"model.dtype='bfloat16': {torch.cuda.get_device_name()} has no bfloat16; valid: float16, float32"
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
def _unbounded(file: Path, size: int, changed: int, dtype: str) -> tuple[str, ...]:
    """Return the names of the tensors with such values."""
    del size, changed
    largest = torch.finfo(getattr(torch, dtype)).max
    broken = (SafetensorError, RuntimeError)
    with (
        foreign(f"model.path: weight file {str(file)!r} is damaged", "the original file", broken),
        safe_open(file, framework="pt") as tensors,
    ):
        return tuple(
            name
            for name in tensors.keys()  # noqa: SIM118 - no mapping
            if not all(_within(part, largest) for part in _parts(tensors, name))
        )


def _within(part: Tensor, largest: float) -> bool:
    # Comparisons with NaN are false.
    return not part.is_floating_point() or bool((part.float().abs() <= largest).all())


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
