"""Progress and remaining time of a sweep."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from statistics import fmean


@dataclass
class Forecast:
    """Counts the cells of a command and estimates the remaining time from the finished cells.

    Cells of one kind (same model and benchmark) are assumed to take equally long; a kind without finished cells, as
    long as the average of the others.

    Attributes:
        cells: number of cells of the command.
        cell: number of the running cell, from 1.
        pending: run keys without a row, each with its kind. Cells that share a key are one run.
        spent: seconds of the finished runs, by kind.
    """

    cells: int = 1
    cell: int = 0
    pending: dict[str, Hashable] = field(default_factory=dict)
    spent: dict[Hashable, list[float]] = field(default_factory=dict)

    def expect(self, cells: int, pending: Mapping[str, Hashable]) -> None:
        """Set the number of cells and the runs to compute."""
        self.cells, self.pending = cells, dict(pending)

    def computed(self, key: str, seconds: float) -> None:
        """Record a finished run."""
        self.spent.setdefault(self.pending.pop(key, None), []).append(seconds)

    def left(self, key: str, elapsed: float, share: float) -> float | None:
        """Return the seconds until the last cell is done; None if unknown.

        Args:
            key: of the running run.
            elapsed: seconds since it began.
            share: of its samples that are finished.
        """
        total = elapsed / share if share > 0 else None
        current = self._duration(self.pending.get(key), total) if total is None else total
        pending = [
            self._duration(kind, total)
            for pending_key, kind in self.pending.items()
            if pending_key != key
        ]
        if current is None or None in pending:
            return None
        return max(current - elapsed, 0.0) + sum(
            duration for duration in pending if duration is not None
        )

    def _duration(self, kind: Hashable, default: float | None) -> float | None:
        if kind in self.spent:
            return fmean(self.spent[kind])
        durations = [seconds for runs in self.spent.values() for seconds in runs]
        return fmean(durations) if durations else default


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, without leading zeros: `9 s`, `1:09`, `2:01:09`."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, remaining_seconds = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02}:{remaining_seconds:02}"
        if hours
        else f"{minutes}:{remaining_seconds:02}"
    )
