"""How long one side of a round takes, and how much of that it really works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")


@dataclass(frozen=True)
class Lap:
    """Seconds of one piece of work: by the wall, and of them those in which its processor worked."""

    wall: float
    busy: float


#: Of a side that had nothing to do.
NO_TIME = Lap(0.0, 0.0)


@dataclass(frozen=True)
class Meter:
    """Times one side's work where it runs, down to its last kernel.

    On a CPU busy is the processor time of the calling thread: a side that waits for a core is not busy, however long
    its round takes. (The thread that drives a step takes part in all of its parallel regions, so further threads need
    no counting.) On GPUs it is the time between two events in the side's own stream. Nobody but that stream is waited
    for, and the wall time ends when its work is done, not when it is launched.

    Attributes:
        devices: GPUs on which the side works, those of a spread model in any order; none on a CPU.
    """

    devices: tuple[torch.device, ...] = ()

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> Meter:
        """Return the meter of a side that works on these devices."""
        return cls(tuple(device for device in devices if device.type == "cuda"))

    def run(self, work: Callable[[], Found]) -> tuple[Found, Lap]:
        """Do the work and return its result and its times. Cost: two events a GPU, a microsecond elsewhere."""
        start, began = time.perf_counter(), time.thread_time()
        before = self._marks()
        found = work()
        after = self._marks()
        for mark in after:
            mark.synchronize()
        busy = time.thread_time() - began
        if before:
            # The work passes from GPU to GPU; whichever takes part for longest spans it.
            pairs = zip(before, after, strict=True)
            busy = max(first.elapsed_time(last) for first, last in pairs) / 1000
        return found, Lap(time.perf_counter() - start, busy)

    def rest(self) -> None:
        """Wait until this side's own streams have done what was asked of them."""
        for device in self.devices:
            torch.cuda.current_stream(device).synchronize()

    def _marks(self) -> list[Any]:
        """Return an event behind what each device's current stream holds."""
        found = []
        for device in self.devices:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(device))
            found.append(mark)
        return found
