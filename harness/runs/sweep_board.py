"""What stands below the running cell of a sweep: how many cells are done, the scores so far, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from espalier.harness.errors import plain
from espalier.harness.runs.forecast import Forecast, clock
from espalier.harness.store.unparsed_mark import FOOTNOTE, MARK, is_marked, mark

T = TypeVar("T")

#: Lines of scores and of failures at most: a board that fills the screen cannot be redrawn in its place.
SCORES, FAILURES = 8, 3
#: Columns that a score takes.
WIDTH = 8
WAITS, RUNS, FAILED = "·", "…", "failed"


class Place(NamedTuple):
    """Where a cell stands on the board."""

    benchmark: str
    method: str
    ratio: float


@dataclass
class Board:
    """Follows the cells of a command; rich draws it as it is at the moment.

    Attributes:
        forecast: how many cells there are, and how long they take.
        cells: how many of them are to have a row.
        scores: what stands in the place of each cell.
        now: the cell that runs.
        done: how many cells have a row.
        stored: how many of these were in the store before.
        answered: samples of the cells that were computed.
        here: samples of the running cell so far.
        failed: cells that came to no row, each with its cause.
    """

    forecast: Forecast = field(default_factory=Forecast)
    cells: int = 0
    scores: dict[Place, str] = field(default_factory=dict)
    now: Place | None = None
    done: int = 0
    stored: int = 0
    answered: int = 0
    here: int = 0
    failed: list[tuple[Place, str]] = field(default_factory=list)

    def expect(self, places: Sequence[Place]) -> None:
        """Take the cells that are to run, in their order."""
        self.cells, self.scores = len(places), dict.fromkeys(places, WAITS)

    def begin(self, place: Place) -> None:
        """Note which cell runs."""
        self.now, self.here, self.scores[place] = place, 0, RUNS

    def finish(self, place: Place, row: Mapping[str, Any]) -> None:
        """Take the row of a cell."""
        value = row["metrics"][headline(row)]["value"]
        number = "undefined" if value is None else f"{value:.3f}"
        self.scores[place] = number + mark(is_marked(row))
        self.done += 1
        if row["status"] == "cached":
            self.stored += 1
        else:
            self.answered += row["n_samples"] - row["extra"].get("resumed_samples", 0)
        self.now, self.here = None, 0

    def fail(self, place: Place, cause: str) -> None:
        """Note why a cell came to no row."""
        self.scores[place] = FAILED
        self.failed.append((place, cause))
        self.now, self.here = None, 0

    def counts(self, left: float | None, elapsed: float) -> str:
        """Return how the cells stand in one line.

        Args:
            left: seconds until the last one is done, None where that is not known.
            elapsed: seconds of the running cell so far.
        """
        running = int(self.now is not None)
        rest = self.cells - self.done - len(self.failed) - running
        before = f" ({self.stored} of them stored before)" if self.stored else ""
        seconds = elapsed + sum(sum(runs) for runs in self.forecast.spent.values())
        speed = (self.answered + self.here) / seconds if seconds > 0 else 0.0
        parts = [
            f"cells: {self.done} done{before}, {running} running, {len(self.failed)} failed, {rest} left",
            *([f"{speed:.3g} samples/s"] if speed else []),
            *([f"{clock(left)} left"] if left is not None else []),
        ]
        return "; ".join(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the scores of the running benchmark and the latest failures."""
        if self.now is not None:
            yield self._grid(self.now, options.max_width)
        if any(score.endswith(MARK) for score in self.scores.values()):
            yield Text(FOOTNOTE)
        for place, cause in self.failed[-FAILURES:]:
            yield Text(
                plain(f"failed: {said(place)}: {cause}"),
                style="red",
                no_wrap=True,
                overflow="ellipsis",
            )
        if len(self.failed) > FAILURES:
            yield Text(f"failed before: {len(self.failed) - FAILURES} more")

    def _grid(self, now: Place, width: int) -> Table:
        here = [one for one in self.scores if one.benchmark == now.benchmark]
        methods = _around(list(dict.fromkeys(one.method for one in here)), now.method, SCORES)
        longest = min(max(map(len, [now.benchmark, *methods])), width // 2)
        many = max((width - longest) // WIDTH, 1)
        ratios = _around(sorted({one.ratio for one in here}), now.ratio, many)
        grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        grid.add_column(now.benchmark, no_wrap=True, overflow="ellipsis", max_width=longest)
        for ratio in ratios:
            grid.add_column(f"{ratio:g}", justify="right", min_width=WIDTH - 1, no_wrap=True)
        for method in methods:
            places = (Place(now.benchmark, method, ratio) for ratio in ratios)
            grid.add_row(method, *(self.scores.get(place, "") for place in places))
        return grid


def headline(row: Mapping[str, Any]) -> str:
    """Return the name of the metric that a row is read by."""
    chosen = row["extra"].get("headline")
    return chosen if chosen in row["metrics"] else str(next(iter(row["metrics"])))


def said(place: Place) -> str:
    """Return a cell in words."""
    return f"{place.method} {place.ratio:g} {place.benchmark}"


def _around(values: Sequence[T], now: T, many: int) -> Sequence[T]:
    """Return at most so many neighbouring values, `now` among them and those before it rather than those behind."""
    end = max(min(values.index(now) + 2, len(values)), min(many, len(values)))
    return values[max(end - many, 0) : end]
