"""Check of weights: tensors of a checkpoint with NaN, infinite or too large values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from espalier.harness.errors import UserError, foreign
from espalier.harness.specs.run_spec import ModelSpec

#: Bytes of weights up to which `model.check_weights=auto` reads the values: seconds.
LARGEST = 2 * 2**30
#: Values that are checked at once.
CHUNK = 2**24


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
