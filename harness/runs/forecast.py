"""How far a sweep is, and how long it still takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from statistics import fmean


@dataclass
class Forecast:
    """Counts the cells of a command and judges those that are left by those that were computed.

    Cells of one kind (the same model and benchmark) are taken to last as long as one another; a kind that has not had
    its turn, as long as the others on average.

    Attributes:
        cells: how many the command has.
        cell: the number of the one that runs, from 1.
        pending: run keys that the store has no row of, each with its kind. Cells that share a key are one run.
        spent: seconds of the runs that are done, by kind.
    """

    cells: int = 1
    cell: int = 0
    pending: dict[str, Hashable] = field(default_factory=dict)
    spent: dict[Hashable, list[float]] = field(default_factory=dict)

    def expect(self, cells: int, pending: Mapping[str, Hashable]) -> None:
        """Take the number of cells and the runs among them that are to be computed."""
        self.cells, self.pending = cells, dict(pending)

    def computed(self, key: str, seconds: float) -> None:
        """Note that a run is done."""
        self.spent.setdefault(self.pending.pop(key, None), []).append(seconds)

    def left(self, key: str, elapsed: float, share: float) -> float | None:
        """Return the seconds until the last cell is done; None where nothing can be said yet.

        Args:
            key: of the run that goes on now.
            elapsed: seconds since it began.
            share: of its samples that are finished.
        """
        whole = elapsed / share if share > 0 else None
        here = self._lasts(self.pending.get(key), whole) if whole is None else whole
        others = [self._lasts(kind, whole) for other, kind in self.pending.items() if other != key]
        if here is None or None in others:
            return None
        return max(here - elapsed, 0.0) + sum(one for one in others if one is not None)

    def _lasts(self, kind: Hashable, otherwise: float | None) -> float | None:
        if kind in self.spent:
            return fmean(self.spent[kind])
        known = [seconds for runs in self.spent.values() for seconds in runs]
        return fmean(known) if known else otherwise


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, without leading zeros: `9 s`, `1:09`, `2:01:09`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
