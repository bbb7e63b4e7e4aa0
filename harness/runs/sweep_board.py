"""The board below the running cell of a sweep: number of finished cells, scores so far, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from espalier.harness.errors import plain
from espalier.harness.runs.forecast import Forecast, clock
from espalier.harness.store.amount_text import amount_text
from espalier.harness.store.unparsed_mark import FOOTNOTE, MARK, is_marked, mark

T = TypeVar("T")

#: Largest number of lines of scores and of failures: a board that fills the screen cannot be redrawn in place.
SCORES, FAILURES = 8, 3
#: Width of a score in characters.
WIDTH = 8
WAITS, RUNS, FAILED = "·", "…", "failed"


class BoardCell(NamedTuple):
    """Position of a cell on the board; `keep` is a number of tokens that was set instead of the ratio."""

    benchmark: str
    method: str
    ratio: float
    keep: int | None = None

    @property
    def amount(self) -> tuple[float, int]:
        """What is removed, in the order of columns."""
        return self.ratio, self.keep or 0

    @property
    def column(self) -> str:
        """What is removed, as the title of a column."""
        return amount_text(self.ratio, self.keep)


@dataclass
class Board:
    """Tracks the cells of a command; rich draws the current state.

    Attributes:
        forecast: number and duration of the cells.
        cells: number of cells that should have a row.
        scores: text shown for each cell.
        now: the running cell.
        done: number of cells with a row.
        stored: number of these that were in the store before.
        answered: samples of the computed cells.
        running_samples: finished samples of the running cell.
        failed: cells without a row, each with the cause.
    """

    forecast: Forecast = field(default_factory=Forecast)
    cells: int = 0
    scores: dict[BoardCell, str] = field(default_factory=dict)
    now: BoardCell | None = None
    done: int = 0
    stored: int = 0
    answered: int = 0
    running_samples: int = 0
    failed: list[tuple[BoardCell, str]] = field(default_factory=list)

    def expect(self, places: Sequence[BoardCell]) -> None:
        """Set the cells to run, in their order."""
        self.cells, self.scores = len(places), dict.fromkeys(places, WAITS)

    def begin(self, place: BoardCell) -> None:
        """Set the running cell."""
        self.now, self.running_samples, self.scores[place] = place, 0, RUNS

    def finish(self, place: BoardCell, row: Mapping[str, Any]) -> None:
        """Record the row of a cell."""
        value = row["metrics"][headline(row)]["value"]
        number = "undefined" if value is None else f"{value:.3f}"
        self.scores[place] = number + mark(is_marked(row))
        self.done += 1
        if row["status"] == "cached":
            self.stored += 1
        else:
            self.answered += row["n_samples"] - row["extra"].get("resumed_samples", 0)
        self.now, self.running_samples = None, 0

    def fail(self, place: BoardCell, cause: str) -> None:
        """Record why a cell has no row."""
        self.scores[place] = FAILED
        self.failed.append((place, cause))
        self.now, self.running_samples = None, 0

    def counts(self, seconds_left: float | None, elapsed: float) -> str:
        """Return the state of all cells in one line.

        Args:
            seconds_left: seconds until the last cell is done, None if unknown.
            elapsed: seconds of the running cell so far.
        """
        running = int(self.now is not None)
        remaining = self.cells - self.done - len(self.failed) - running
        stored_note = f" ({self.stored} of them stored before)" if self.stored else ""
        seconds = elapsed + sum(sum(runs) for runs in self.forecast.spent.values())
        speed = (self.answered + self.running_samples) / seconds if seconds > 0 else 0.0
        parts = [
            f"cells: {self.done} done{stored_note}, {running} running, {len(self.failed)} failed, {remaining} left",
            *([f"{speed:.3g} samples/s"] if speed else []),
            *([f"{clock(seconds_left)} left"] if seconds_left is not None else []),
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
                plain(f"failed: {cell_text(place)}: {cause}"),
                style="red",
                no_wrap=True,
                overflow="ellipsis",
            )
        if len(self.failed) > FAILURES:
            yield Text(f"failed before: {len(self.failed) - FAILURES} more")

    def _grid(self, now: BoardCell, width: int) -> Table:
        cells = [cell for cell in self.scores if cell.benchmark == now.benchmark]
        methods = _around(list(dict.fromkeys(cell.method for cell in cells)), now.method, SCORES)
        longest = min(max(map(len, [now.benchmark, *methods])), width // 2)
        titles = {cell.amount: cell.column for cell in sorted(cells, key=lambda cell: cell.amount)}
        wide = max(WIDTH, *(len(title) + 1 for title in titles.values()))
        column_count = max((width - longest) // wide, 1)
        amounts = _around(list(titles), now.amount, column_count)
        grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        grid.add_column(now.benchmark, no_wrap=True, overflow="ellipsis", max_width=longest)
        for amount in amounts:
            grid.add_column(titles[amount], justify="right", min_width=WIDTH - 1, no_wrap=True)
        scores = {(cell.method, cell.amount): self.scores[cell] for cell in cells}
        for method in methods:
            grid.add_row(method, *(scores.get((method, amount), "") for amount in amounts))
        return grid


def headline(row: Mapping[str, Any]) -> str:
    """Return the name of a row's headline metric."""
    chosen = row["extra"].get("headline")
    return chosen if chosen in row["metrics"] else str(next(iter(row["metrics"])))


def cell_text(place: BoardCell) -> str:
    """Return a cell as text."""
    return f"{place.method} {place.column} {place.benchmark}"


def _around(values: Sequence[T], now: T, count: int) -> Sequence[T]:
    """Return at most `count` neighbouring values including `now`, preferring those before it."""
    end = max(min(values.index(now) + 2, len(values)), min(count, len(values)))
    return values[max(end - count, 0) : end]
