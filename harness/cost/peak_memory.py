"""Peak memory over a block, and the bytes that a key-value cache holds."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """Peak bytes, set when the block ends or earlier by `stop`, and in `note` their exact meaning."""

    bytes: int = 0
    note: str = ""
    _read: Callable[[], int] | None = field(default=None, repr=False, compare=False)

    def stop(self) -> None:
        """Take the reading now: later allocations in the block do not count, and a second call changes nothing."""
        if self._read is not None:
            self.bytes, self._read = self._read(), None


@contextmanager
def peak_memory(*devices: torch.device | str) -> Iterator[Peak]:
    """Measure the peak memory of the block on the devices of a model; none means the CPU.

    CUDA: the allocator's peak; for several devices the sum of their peaks, which need not occur at the same time. Linux
    CPU: the peak resident set of the whole process (VmHWM), reset at the start of the block; it includes earlier
    resident memory. If the reset is not allowed, or off Linux, the peak over the life of the process, and the note
    states that.
    """
    named = dict.fromkeys(torch.device(device) for device in devices)
    cards = [device for device in named if device.type == "cuda"]
    peak = _of_cards(cards) if cards else _of_process()
    try:
        yield peak
    finally:
        peak.stop()


def _of_cards(cards: Sequence[torch.device]) -> Peak:
    for card in cards:
        torch.cuda.reset_peak_memory_stats(card)
    several = f", summed over {len(cards)} devices" if len(cards) > 1 else ""
    return Peak(
        note=f"peak of allocated device memory over the block{several}",
        _read=lambda: sum(torch.cuda.max_memory_allocated(card) for card in cards),
    )


def _of_process() -> Peak:
    note = (
        "peak resident set of the process over the block"
        if reset_resident_peak()
        else "peak resident set over the life of the process (the counter could not be reset)"
    )
    return Peak(note=note, _read=resident_peak)


def reset_resident_peak() -> bool:
    """Reset VmHWM to the present resident set; return False if that is not allowed."""
    try:
        _RESET.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def resident_peak() -> int:
    """Return the peak resident set in bytes: VmHWM on Linux, `ru_maxrss` elsewhere."""
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def kv_bytes(cache: Any) -> int:
    """Return the bytes of storage of a cache's keys and values, summed over layers.

    Storage, not elements: a short view of a long tensor still holds the long one, and two views of one storage count
    once. The states of linear attention count as well. `cache` is a transformers cache (`.layers` with `.keys` and
    `.values`; layers not filled yet count nothing) or a sequence of (keys, values) pairs.
    """
    storages: dict[tuple[int, torch.device], int] = {}
    for layer in getattr(cache, "layers", cache):
        for tensor in layer if isinstance(layer, tuple | list) else _tensors(layer):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr(), tensor.device] = storage.nbytes()
    return sum(storages.values())


def _tensors(layer: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors of a layer, which does not have them before its first update."""
    states = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
    parts = (tensor for table in states for tensor in table.values())
    return getattr(layer, "keys", None), getattr(layer, "values", None), *parts
