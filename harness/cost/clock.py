"""Wall-clock time of named phases, with all devices of the model synchronized at both ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import TracebackType

import torch


class Clock:
    """Adds up the time of named phases.

    Phases may nest: an inner phase counts for itself and inside the outer one. A phase entered again while it is open
    counts once, from the outermost entry to its exit. The queues of all CUDA devices are drained at both ends of a
    phase; elsewhere there is nothing to wait for, and a phase costs about a microsecond.

    Args:
        devices: all devices that the timed work runs on; none means the CPU.
        enabled: False turns every phase into a no-op that neither synchronises nor records.
    """

    def __init__(self, *devices: torch.device | str, enabled: bool = True) -> None:
        """Start with no phases."""
        self.enabled = enabled
        named = [torch.device(device) for device in devices if enabled]
        self._drained = [device for device in dict.fromkeys(named) if device.type == "cuda"]
        self._phases: dict[str, _Phase] = {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context manager that times one stretch of phase `name`, failed or not."""
        return self._named(name) if self.enabled else _NOTHING

    def start(self, name: str) -> None:
        """Open phase `name` for a stretch that begins and ends in different hooks."""
        if self.enabled:
            self._named(name).open()

    def stop(self, name: str) -> None:
        """Close a phase opened by `start`.

        Raises:
            RuntimeError: the phase is not open.
        """
        if self.enabled:
            self._named(name).close()

    def totals_ms(self) -> dict[str, float]:
        """Return the milliseconds spent in each phase since the start or the last reset."""
        return {name: phase.total_ns / 1e6 for name, phase in self._phases.items()}

    def counts(self) -> dict[str, int]:
        """Return the number of stretches of each phase."""
        return {name: phase.count for name, phase in self._phases.items()}

    def reset(self) -> None:
        """Remove all phases.

        Raises:
            RuntimeError: a phase is still open.
        """
        running = [name for name, phase in self._phases.items() if phase.depth]
        if running:
            raise RuntimeError(f"clock reset inside the open phase {running[0]!r}")
        self._phases.clear()

    def _named(self, name: str) -> _Phase:
        if name not in self._phases:
            self._phases[name] = _Phase(self, name)
        return self._phases[name]

    def drain(self) -> None:
        """Wait until the devices have finished what this thread has queued; a no-op off CUDA."""
        for device in self._drained:
            # Only this side's own stream: another thread may be working on the same device.
            torch.cuda.current_stream(device).synchronize()


class _Phase(AbstractContextManager[None]):
    """One named phase: re-entrant, reused for every stretch so that entering allocates nothing."""

    __slots__ = ("clock", "count", "depth", "name", "started_ns", "total_ns")

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.depth = 0
        self.count = 0
        self.total_ns = 0
        self.started_ns = 0

    def open(self) -> None:
        if self.depth == 0:
            self.clock.drain()
            self.started_ns = perf_counter_ns()
        self.depth += 1

    def close(self) -> None:
        if self.depth == 0:
            raise RuntimeError(f"phase {self.name!r} stopped without a start")
        self.depth -= 1
        if self.depth == 0:
            self.clock.drain()
            self.total_ns += perf_counter_ns() - self.started_ns
            self.count += 1

    __enter__ = open

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_NOTHING: AbstractContextManager[None] = nullcontext()
