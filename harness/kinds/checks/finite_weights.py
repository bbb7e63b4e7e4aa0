"""Weights that no arithmetic survives: tensors of a checkpoint with NaN, infinite or too large values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from espalier.harness.errors import UserError, foreign
from espalier.harness.specs.run_spec import ModelSpec

#: Bytes of weights up to which `model.check_weights=auto` looks: seconds.
LARGEST = 2 * 2**30
#: Values that are looked at at once.
CHUNK = 2**24


def check_finite(model: ModelSpec, folder: Path) -> None:
    """Raise UserError if a tensor of a checkpoint holds values that the run's precision cannot hold.

    Cost: one read of the weights, a part of a tensor at a time, and none where `model.check_weights` says so.
    """
    files = sorted(folder.glob("*.safetensors"))
    wanted = model.check_weights
    if wanted == "auto":
        wanted = sum(file.stat().st_size for file in files) <= LARGEST
    if not wanted:
        return
    found = [
        name
        for file in files
        for name in _unbounded(file, file.stat().st_size, file.stat().st_mtime_ns, model.dtype)
    ]
    if found:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(
            f"model={model.name}: tensor {found[0]!r}{others} of {str(folder)!r} holds NaN, infinite values or values "
            f"beyond model.dtype={model.dtype}; valid: the original files, a wider dtype, or model.check_weights=false"
        )


@cache  # a sweep asks for every cell; size and time of change stand for the content
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
    # A NaN is not smaller than anything.
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
