"""Memory: the peak over a block, the bytes of a key-value cache, and what a process may still allocate."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.harness.errors import FOREIGN

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
    resident memory. If the reset is not allowed, the peak over the life of the process, and the note states that.
    """
    named = dict.fromkeys(torch.device(device) for device in devices)
    cards = [device for device in named if device.type == "cuda"]
    if cards:
        for card in cards:
            torch.cuda.reset_peak_memory_stats(card)
        several = f", summed over {len(cards)} devices" if len(cards) > 1 else ""
        peak = Peak(
            note=f"peak of allocated device memory over the block{several}",
            _read=lambda: sum(torch.cuda.max_memory_allocated(card) for card in cards),
        )
    else:
        note = (
            "peak resident set of the process over the block"
            if reset_resident_peak()
            else "peak resident set over the life of the process (the counter could not be reset)"
        )
        peak = Peak(note=note, _read=resident_peak)
    try:
        yield peak
    finally:
        peak.stop()


def reset_resident_peak() -> bool:
    """Reset VmHWM to the present resident set; return False if that is not allowed."""
    try:
        _RESET.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def resident_peak() -> int:
    """Return the peak resident set in bytes."""
    return _bytes_of(PROC / "self/status", "VmHWM")


def kv_bytes(cache: Any) -> int:
    """Return the bytes of storage of a cache's keys and values, summed over layers.

    Storage, not elements: a short view of a long tensor still holds the long one, and two views of one storage count
    once. The states of linear attention count as well. `cache` is a transformers cache (`.layers` with `.keys` and
    `.values`; layers not filled yet count nothing) or a sequence of (keys, values) pairs.
    """
    storages: dict[int, int] = {}
    for layer in getattr(cache, "layers", cache):
        for tensor in layer if isinstance(layer, tuple | list) else _tensors(layer):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _tensors(layer: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors of a layer, which does not have them before its first update."""
    states = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
    parts = (tensor for table in states for tensor in table.values())
    return getattr(layer, "keys", None), getattr(layer, "values", None), *parts


PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")

#: Tensors up to this size are allocated without checking free memory.
SMALL = 64 * 2**20

#: Maximum share of free memory for larger tensors.
SHARE = 0.5

#: (limit, usage, key of the page cache in memory.stat) of control groups, version 2 and version 1.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class DeviceMemory:
    """Memory of one device from the view of this process.

    Args:
        device: `cpu`, or a CUDA device; the plain name `cuda` is the current one.
        share: number of processes that share this machine's free CPU memory.
    """

    def __init__(self, device: str, share: int = 1) -> None:
        self.device = torch.device(device)
        self._share = share

    def used(self) -> int:
        """Return the bytes that the process holds: of tensors on a device, resident on the CPU."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return _bytes_of(PROC / "self/status", "VmRSS")

    def reachable(self) -> int:
        """Return the total bytes that the process may hold."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return free + torch.cuda.memory_reserved(self.device)
        return self.used() + free_memory() // self._share

    def tidy(self) -> None:
        """Release cached blocks."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def free_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the bytes available without swapping: MemAvailable, or less if a control group allows less."""
    return min([_bytes_of(proc / "meminfo", "MemAvailable"), *_group_rooms(proc, groups)])


def _group_rooms(proc: Path, groups: Path) -> Iterator[int]:
    """Yield the bytes that each control group above this process still allows."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except FOREIGN:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        folder = root / path.lstrip("/")
        # In a container the path may be one of the host's; its root exists all the same.
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                yield from _group_room(place)


def _group_room(folder: Path) -> Iterator[int]:
    for limit_file, usage_file, cache_key in FILES:
        try:
            limit = (folder / limit_file).read_text(encoding="utf-8").strip()
            usage = int((folder / usage_file).read_text(encoding="utf-8"))
            stat = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        except FOREIGN:
            continue
        if limit.isdecimal():  # version 2 writes `max` if there is no limit
            # Cached file pages count as usage, but are dropped when memory is needed.
            cache = next(
                (int(line.split()[1]) for line in stat if line.startswith(f"{cache_key} ")), 0
            )
            yield max(int(limit) - usage + cache, 0)


def _bytes_of(path: Path, name: str) -> int:
    """Return the entry `name: <n> kB` of a file of /proc in bytes."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def fits_in_free_memory(n_bytes: int, device: torch.device) -> bool:
    """Return whether a tensor of this size takes at most half of the free memory of a device.

    Small tensors always fit, without a check.
    """
    if n_bytes <= SMALL:
        return True
    room = DeviceMemory(str(device))
    return n_bytes <= SHARE * (room.reachable() - room.used())
