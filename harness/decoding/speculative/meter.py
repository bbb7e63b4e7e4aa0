"""Wall and busy time of one side of a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Lap:
    """Seconds of one piece of work: wall time, and the part in which its processor worked."""

    wall: float
    busy: float


#: The lap of a side without work.
NO_TIME = Lap(0.0, 0.0)


@dataclass(frozen=True)
class Meter:
    """Measures one side's work where it runs, down to its last kernel.

    On a CPU busy is the processor time of the calling thread: a side that waits for a core is not busy, however long
    its round takes. (The thread that drives a step takes part in all of its parallel regions, so other threads need no
    counting.) On GPUs it is the time between two events in the side's own stream. Only that stream is synchronized, and
    the wall time ends when its work is done, not when it is launched.

    Attributes:
        devices: GPUs on which the side works, in any order; empty on a CPU.
    """

    devices: tuple[torch.device, ...] = ()

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> Meter:
        """Return the meter of a side on these devices."""
        return cls(tuple(device for device in devices if device.type == "cuda"))

    def run(self, work: Callable[[], Result]) -> tuple[Result, Lap]:
        """Do the work and return its result and its times. Cost: two events per GPU, a microsecond elsewhere."""
        start, began = time.perf_counter(), time.thread_time()
        before = self._record_events()
        result = work()
        after = self._record_events()
        for event in after:
            event.synchronize()
        busy = time.thread_time() - began
        if before:
            # The work passes from GPU to GPU; the longest span covers it.
            pairs = zip(before, after, strict=True)
            busy = max(first.elapsed_time(last) for first, last in pairs) / 1000
        return result, Lap(time.perf_counter() - start, busy)

    def wait(self) -> None:
        """Wait until this side's own streams have finished their work."""
        for device in self.devices:
            torch.cuda.current_stream(device).synchronize()

    def _record_events(self) -> list[Any]:
        """Return an event recorded at the end of each device's current stream."""
        events = []
        for device in self.devices:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events
