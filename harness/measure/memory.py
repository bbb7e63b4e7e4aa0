"""Peak memory over a block, and the bytes that a key-value cache really holds."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """Filled when the block ends: peak bytes, and in `note` what exactly they are."""

    bytes: int = 0
    note: str = ""


@contextmanager
def peak_memory(device: torch.device | str = "cpu") -> Iterator[Peak]:
    """Measure the peak memory of the block.

    CUDA: the allocator's peak on `device`. Linux CPU: the peak resident set of the whole process
    (VmHWM), reset at the start of the block; it includes what was resident before. Where the reset
    is not allowed, or off Linux, the peak of the process's life, and the note says so.
    """
    device = torch.device(device)
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        peak.note = "peak of allocated device memory over the block"
        try:
            yield peak
        finally:
            peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    reset = reset_resident_peak()
    peak.note = (
        "peak resident set of the process over the block"
        if reset
        else "peak resident set over the life of the process (the counter could not be reset)"
    )
    try:
        yield peak
    finally:
        peak.bytes = resident_peak()


def reset_resident_peak() -> bool:
    """Set VmHWM back to the present resident set; return False where that is not allowed."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def resident_peak() -> int:
    """Return the peak resident set in bytes: VmHWM on Linux, `ru_maxrss` elsewhere."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def kv_bytes(cache: Any) -> int:
    """Return the bytes of storage behind a cache's keys and values, summed over layers.

    Storage, not elements: a short view of a long tensor still holds the long one, and two views of
    one storage hold it once. `cache` is a transformers cache (`.layers` with `.keys` and `.values`;
    layers not filled yet count nothing) or a sequence of (keys, values) pairs.
    """
    storages: dict[tuple[int, torch.device], int] = {}
    for layer in getattr(cache, "layers", cache):
        pair = layer if isinstance(layer, tuple | list) else _pair(layer)
        for tensor in pair:
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr(), tensor.device] = storage.nbytes()
    return sum(storages.values())


def _pair(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    """Read the tensors of a layer, which does not have them before its first update."""
    return getattr(layer, "keys", None), getattr(layer, "values", None)
