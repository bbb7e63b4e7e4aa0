"""Progress while a cell runs, on a terminal or below a notebook's cell: phase, samples, remaining time of the sweep.

A notebook gets plain text that is replaced: it needs no widgets.
"""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, TextIO, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from espalier.harness.errors import plain
from espalier.harness.specs.comparable import amount, name
from espalier.harness.store.row_text import FOOTNOTE, MARK, MEANS, amount_text, is_marked, mark


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
        others = (kind for other, kind in self.pending.items() if other != key)
        pending = [self._duration(kind, total) for kind in others]
        if current is None or None in pending:
            return None
        return max(current - elapsed, 0.0) + sum(filter(None, pending))

    def _duration(self, kind: Hashable, default: float | None) -> float | None:
        if kind in self.spent:
            return fmean(self.spent[kind])
        durations = [seconds for runs in self.spent.values() for seconds in runs]
        return fmean(durations) if durations else default


def clock(seconds: float, minutes: bool = False) -> str:
    """Return a duration without leading zeros: `9 s` (with `minutes` `0:09`), `1:09`, `2:01:09`."""
    total = round(seconds)
    if total < 60 and not minutes:
        return f"{total} s"
    hours, remainder = divmod(total, 3600)
    return (
        f"{hours}:{remainder // 60:02}:{remainder % 60:02}"
        if hours
        else f"{remainder // 60}:{remainder % 60:02}"
    )


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
        self.scores[place] = _number(row) + mark(is_marked(row))
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
        seconds = elapsed + sum(map(sum, self.forecast.spent.values()))
        speed = (self.answered + self.running_samples) / seconds if seconds > 0 else 0.0
        return (
            f"cells: {self.done} done{stored_note}, {running} running, {len(self.failed)} failed, {remaining} left"
            + (f"; {speed:.3g} samples/s" if speed else "")
            + ("" if seconds_left is None else f"; {clock(seconds_left)} left")
        )

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
        for column in amounts:
            grid.add_column(titles[column], justify="right", min_width=WIDTH - 1, no_wrap=True)
        scores = {(cell.method, cell.amount): self.scores[cell] for cell in cells}
        for method in methods:
            grid.add_row(method, *(scores.get((method, column), "") for column in amounts))
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


#: Updates of a display in a second.
REFRESHES = 4

#: Columns of text in a notebook.
PAGE_WIDTH = 100


@dataclass
class NotebookArea:
    """Draws lines as text.

    Args:
        lines: the lines drawn.
        update: shows a text in place of the previous one.
        between: least seconds between two updates by `count`.
    """

    lines: RenderableType
    update: Callable[[str], None]
    between: float = 1 / REFRESHES
    _drawn: float = field(default=float("-inf"), init=False)

    def draw(self) -> None:
        """Show the current state."""
        console = Console(file=io.StringIO(), width=PAGE_WIDTH, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.lines)
        self.update(capture.get())
        self._drawn = time.monotonic()

    def count(self) -> None:
        """Show the current state, if the last update is long enough ago."""
        if time.monotonic() - self._drawn >= self.between:
            self.draw()


@contextmanager
def notebook_area() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text below the running cell; the text is removed at the end."""
    # A notebook has it, and other programs do not need it.
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    handle.display({"text/plain": ""}, raw=True)
    try:
        yield lambda text: handle.update({"text/plain": text}, raw=True)
    finally:
        handle.update({"text/plain": ""}, raw=True)


class TimeLeft(ProgressColumn):
    """Column with the remaining time of a line, computed at each redraw; the elapsed time until it is known."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        left = task.fields["left"]()
        return Text(clock(task.elapsed or 0.0) if left is None else f"{clock(left)} left")


class CellLines:
    """The progress lines of one cell.

    Args:
        progress: draws the lines; None without a terminal.
        title: shown while the cell's samples run.
        board: of the cell's sweep.
        key: run key of the cell.
    """

    def __init__(self, progress: Progress | None, title: str, board: Board, key: str) -> None:
        self._progress, self._title, self._board, self._key = progress, title, board, key
        self._start, self._share = time.monotonic(), 0.0
        self._redraw: Callable[[], None] = lambda: None
        self._count: Callable[[], None] = lambda: None
        sweep = board.forecast
        if progress is not None:
            self._samples = progress.add_task(
                title, total=None, count="", rate="", left=self._samples_left
            )
            if sweep.cells > 1:
                progress.add_task(
                    "whole sweep",
                    total=sweep.cells,
                    completed=sweep.cell - 1,
                    count=f"{sweep.cell}/{sweep.cells}",
                    rate="",
                    left=self._sweep_left,
                )

    def attach(self, redraw: Callable[[], None], count: Callable[[], None] = lambda: None) -> None:
        """Set the function that draws these lines at once, and the one called after each sample."""
        self._redraw, self._count = redraw, count

    def phase(self, text: str) -> None:
        """Show a phase before the samples."""
        if self._progress is not None:
            self._progress.update(self._samples, description=text)
            # Redraw now: the next step may block the interpreter for seconds.
            self._redraw()

    def samples(self, finished: int, total: int) -> None:
        """Show the number of finished samples."""
        self._share, self._board.running_samples = finished / max(total, 1), finished
        if self._progress is None:
            return
        speed = self._progress.tasks[0].speed
        self._progress.update(
            self._samples,
            description=self._title,
            completed=finished,
            total=total,
            count=f"{finished}/{total}",
            rate=f"{speed:.1f} it/s" if speed else "",
        )
        self._count()

    def _samples_left(self) -> float | None:
        assert self._progress is not None
        return self._progress.tasks[0].time_remaining

    def _sweep_left(self) -> float | None:
        return self._board.forecast.left(self._key, self._elapsed, self._share)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the lines and, for a sweep, the board below them."""
        assert self._progress is not None
        yield self._progress
        if self._board.forecast.cells > 1:
            yield Text(self._board.counts(self._sweep_left(), self._elapsed))
            yield self._board


@contextmanager
def cell_progress(
    title: str, board: Board, key: str = "", stream: TextIO | None = None, quiet: bool = False
) -> Iterator[CellLines]:
    """Show the progress of a cell and its sweep, on a terminal or below a notebook's cell; elsewhere silent.

    Args:
        title: of the cell.
        board: of its sweep.
        key: its run key.
        stream: output; standard error if None.
        quiet: show nothing.
    """
    console = Console(file=stream or sys.stderr)
    if quiet or not (console.is_terminal or console.is_jupyter):
        yield CellLines(None, title, board, key)
        return
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("{task.description}", table_column=text),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[count]}", justify="right"),
        TextColumn("{task.fields[rate]}", justify="right"),
        TimeLeft(),
    )
    lines = CellLines(Progress(*columns, console=console, expand=True), title, board, key)
    if console.is_jupyter:
        with notebook_area() as update:
            area = NotebookArea(lines, update)
            lines.attach(area.draw, area.count)
            yield lines
        return
    with Live(lines, console=console, transient=True, refresh_per_second=REFRESHES) as live:
        lines.attach(live.refresh)
        yield lines


def tell_finished(
    row: Mapping[str, Any], sweep: Forecast, seconds: float, stream: TextIO | None = None
) -> None:
    """Print one line on a terminal about a finished cell of a sweep; long lines wrap with an indent."""
    console = Console(file=stream or sys.stderr)
    if not console.is_terminal:
        return
    count = f"{sweep.cell:>{len(str(sweep.cells))}}/{sweep.cells}"
    parts = (
        f"{count}  {row['status']:<7} {clock(seconds):>7}",
        f"{name(row)} {amount(row)} {row['benchmark']}",
        score(row),
        f"n={row['n_samples']}",
    )
    indent = " " * (len(count) + 2)
    lines = textwrap.wrap(
        "  ".join(parts), console.width, subsequent_indent=indent, break_on_hyphens=False
    )
    print("\n".join(lines), file=stream or sys.stderr, flush=True)


def score(row: Mapping[str, Any]) -> str:
    """Return the headline metric with its value."""
    return f"{headline(row)} {_number(row)}{f' ({MEANS})' if is_marked(row) else ''}"


def _number(row: Mapping[str, Any]) -> str:
    value = row["metrics"][headline(row)]["value"]
    return "undefined" if value is None else f"{value:.3f}"
