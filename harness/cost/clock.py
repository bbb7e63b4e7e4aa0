"""Time of named phases: by the wall on the host, by events in the streams of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch


class Clock:
    """Adds up the time of named phases.

    Phases may nest: an inner phase counts for itself and inside the outer one. A phase entered again while it is open
    counts once, from the outermost entry to its exit. On GPUs a phase lasts from one event to another in the streams of
    all of them, and the host waits when totals are read, not before. Elsewhere a phase costs about a microsecond.

    Args:
        devices: all devices that the timed work runs on; none means the CPU.
        enabled: False turns every phase into a no-op that records nothing.

    Attributes:
        cards: GPUs among the devices.
    """

    def __init__(self, *devices: torch.device | str, enabled: bool = True) -> None:
        """Start with no phases."""
        self.enabled = enabled
        named = [torch.device(device) for device in devices if enabled]
        self.cards = tuple(device for device in dict.fromkeys(named) if device.type == "cuda")
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
        """Return the milliseconds spent in each phase since the start or the last reset. Waits for their ends."""
        return {name: phase.total_ms() for name, phase in self._phases.items()}

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
            self._phases[name] = _Phase(name, self.cards)
        return self._phases[name]


class DelayedTimes(Mapping[str, float]):
    """Milliseconds of phases that are read from a clock when they are first looked at.

    Args:
        read: returns them.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._times = cache(read)

    def __getitem__(self, name: str) -> float:
        """Return the milliseconds of a phase."""
        return self._times()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the phases."""
        return iter(self._times())

    def __len__(self) -> int:
        """Return the number of phases."""
        return len(self._times())


def drain(cards: Sequence[torch.device]) -> None:
    """Wait until GPUs have finished what this thread has queued."""
    for card in cards:
        # Only this side's own stream: another thread may be working on the same device.
        torch.cuda.current_stream(card).synchronize()


def mark(cards: Sequence[torch.device]) -> list[Any]:
    """Return a timing event in the current stream of each GPU, after the work of all of them, without waiting."""
    streams = [torch.cuda.current_stream(card) for card in cards]
    if len(streams) > 1:
        # Events of several GPUs cannot be compared, so that all GPUs begin and end a stretch together.
        ends = [stream.record_event() for stream in streams]
        for stream in streams:
            for end in ends:
                stream.wait_event(end)
    return [stream.record_event(torch.cuda.Event(enable_timing=True)) for stream in streams]


def elapsed_ms(start: Sequence[Any], end: Sequence[Any]) -> float:
    """Return the milliseconds between two marks of the same GPUs. Waits for the second."""
    for event in end:
        event.synchronize()
    return max(float(first.elapsed_time(last)) for first, last in zip(start, end, strict=True))


class _Phase(AbstractContextManager[None]):
    """One named phase: re-entrant, reused for every stretch so that entering allocates nothing on the host."""

    __slots__ = ("cards", "count", "depth", "marks", "name", "started", "total_ns")

    def __init__(self, name: str, cards: Sequence[torch.device]) -> None:
        self.name = name
        self.cards = cards
        self.depth = 0
        self.count = 0
        self.total_ns = 0
        self.started: Any = None
        #: Start and end of each stretch on GPUs that was not read yet.
        self.marks: list[tuple[list[Any], list[Any]]] = []

    def open(self) -> None:
        if self.depth == 0:
            self.started = mark(self.cards) if self.cards else perf_counter_ns()
        self.depth += 1

    def close(self) -> None:
        if self.depth == 0:
            raise RuntimeError(f"phase {self.name!r} stopped without a start")
        self.depth -= 1
        if self.depth:
            return
        self.count += 1
        if self.cards:
            self.marks.append((self.started, mark(self.cards)))
        else:
            self.total_ns += perf_counter_ns() - self.started

    def total_ms(self) -> float:
        while self.marks:
            self.total_ns += round(1e6 * elapsed_ms(*self.marks.pop()))
        return self.total_ns / 1e6

    __enter__ = open

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_NOTHING: AbstractContextManager[None] = nullcontext()
