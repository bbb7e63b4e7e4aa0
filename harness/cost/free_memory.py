"""Memory that a process may still allocate: on a CUDA device, or of the machine and its control group."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from espalier.harness.errors import FOREIGN

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
        return _kilobytes(PROC / "self/status", "VmRSS") or 0

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
    """Return the bytes available without swapping: MemAvailable, or less if a control group allows less.

    Off Linux, which provides neither, the physical memory.
    """
    available = _kilobytes(proc / "meminfo", "MemAvailable")
    if available is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([available, *_group_rooms(proc, groups)])


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


def _kilobytes(path: Path, name: str) -> int | None:
    """Return the entry `name: <n> kB` of a file of /proc in bytes; None if there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FOREIGN:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None
    )


def fits_in_free_memory(n_bytes: int, device: torch.device) -> bool:
    """Return whether a tensor of this size takes at most half of the free memory of a device.

    Small tensors always fit, without a check.
    """
    if n_bytes <= SMALL:
        return True
    room = DeviceMemory(str(device))
    return n_bytes <= SHARE * (room.reachable() - room.used())
