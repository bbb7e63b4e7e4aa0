"""How much memory a process may still take: on a CUDA device, or of the machine and the control group it is in."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")

#: Tensors up to this size are made without asking how much memory is free.
SMALL = 64 * 2**20

#: Larger ones may take this share of it.
SHARE = 0.5

#: (limit, usage, key of the page cache in memory.stat) of control groups, version 2 and version 1.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class DeviceMemory:
    """Memory of one device as this process sees it.

    Args:
        device: `cpu`, or a CUDA device; the plain name `cuda` is the current one.
        share: processes that divide what is free on this machine's CPU between them.
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
        """Return the bytes that the process may hold in all."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return free + torch.cuda.memory_reserved(self.device)
        return self.used() + free_memory() // self._share

    def tidy(self) -> None:
        """Hand cached blocks back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def free_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the bytes that can be had without swapping: MemAvailable, or less if a control group allows less.

    Off Linux, which tells neither, the physical memory.
    """
    available = _kilobytes(proc / "meminfo", "MemAvailable")
    if available is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([available, *_group_rooms(proc, groups)])


def _group_rooms(proc: Path, groups: Path) -> Iterator[int]:
    """Yield what each control group above this process still allows."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        folder = root / path.lstrip("/")
        # In a container the path may be one of the host's; its root is there all the same.
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                yield from _group_room(place)


def _group_room(folder: Path) -> Iterator[int]:
    for limit_file, usage_file, cache_key in FILES:
        try:
            limit = (folder / limit_file).read_text(encoding="utf-8").strip()
            usage = int((folder / usage_file).read_text(encoding="utf-8"))
            stat = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        if limit.isdecimal():  # version 2 writes `max` where there is none
            # Files that were read and are not in use count as usage, and are dropped when memory is needed.
            cache = next(
                (int(line.split()[1]) for line in stat if line.startswith(f"{cache_key} ")), 0
            )
            yield max(int(limit) - usage + cache, 0)


def _kilobytes(path: Path, name: str) -> int | None:
    """Return the entry `name: <n> kB` of a file of /proc in bytes; None where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None
    )


def fits_beside(n_bytes: int, device: torch.device) -> bool:
    """Say whether a tensor of so many bytes takes at most half of the memory that is free on a device.

    Small ones do, without asking.
    """
    if n_bytes <= SMALL:
        return True
    room = DeviceMemory(str(device))
    return n_bytes <= SHARE * (room.reachable() - room.used())
