"""Progress while a cell runs, on a terminal or below a notebook's cell: phase, samples, remaining time of the sweep."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from espalier.harness.errors import plain
from espalier.harness.specs.comparable import amount, name
from espalier.harness.store.row_text import MEANS, is_marked, prompt_notes, prompt_settings


@dataclass
class Board:
    """Counts the cells of a command and estimates the remaining time from the finished ones.

    Cells of one kind (same model and benchmark) are assumed to take equally long; a kind without finished cells, as
    long as the average of the others.

    Attributes:
        cells: number of cells that should have a row.
        pending: run keys without a row, each with its kind. Cells that share a key are one run.
        spent: seconds of the finished runs, by kind.
        done: number of cells with a row.
        stored: number of these that were in the store before.
        failed: number of cells that ran and have no row.
        answered: samples of the computed cells.
        running_samples: finished samples of the running cell.
        prompts: name of each finished row, and what its prompt is made of.
        line_time: when a line about the progress was last written, or the command began.
    """

    cells: int = 1
    pending: dict[str, Hashable] = field(default_factory=dict)
    spent: dict[Hashable, list[float]] = field(default_factory=dict)
    done: int = 0
    stored: int = 0
    failed: int = 0
    answered: int = 0
    running_samples: int = 0
    prompts: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    line_time: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> int:
        """Number of cells that have run."""
        return self.done + self.failed

    def finish(self, row: Mapping[str, Any], seconds: float) -> None:
        """Record the row of a cell."""
        kind = self.pending.pop(row["run_key"], None)
        self.done += 1
        self.running_samples = 0
        if row["status"] == "cached":
            self.stored += 1
        else:
            self.spent.setdefault(kind, []).append(seconds)
            self.answered += row["n_samples"] - row["extra"].get("resumed_samples", 0)

    def fail(self, key: str) -> None:
        """Record that a run has no row; it takes no more time."""
        self.pending.pop(key, None)
        self.failed += 1
        self.running_samples = 0

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

    def counts(self, seconds_left: float | None, elapsed: float) -> str:
        """Return the state of all cells in one line while one of them runs.

        Args:
            seconds_left: seconds until the last cell is done, None if unknown.
            elapsed: seconds of the running cell so far.
        """
        stored_note = f" ({self.stored} of them stored before)" if self.stored else ""
        seconds = elapsed + sum(map(sum, self.spent.values()))
        speed = (self.answered + self.running_samples) / seconds if seconds > 0 else 0.0
        return (
            f"cells: {self.done} done{stored_note}, 1 running, {self.failed} failed, "
            f"{self.cells - self.ended - 1} left"
            + (f"; {speed:.3g} samples/s" if speed else "")
            + ("" if seconds_left is None else f"; {clock(seconds_left)} left")
        )


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


def headline(row: Mapping[str, Any]) -> str:
    """Return the name of a row's headline metric."""
    chosen = row["extra"].get("headline")
    return chosen if chosen in row["metrics"] else str(next(iter(row["metrics"])))


#: Updates of a display in a second; seconds between two lines where there is none.
REFRESHES, EVERY = 4, 60.0


class TimeLeft(ProgressColumn):
    """Column with the remaining time of a line, computed at each redraw; the elapsed time until it is known."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        seconds = task.time_remaining
        return Text(clock(task.elapsed or 0.0) if seconds is None else f"{clock(seconds)} left")


class CellLines:
    """The progress lines of one cell.

    Args:
        progress: draws the lines; None without a terminal.
        title: shown while the cell's samples run.
        board: of the cell's sweep.
        key: run key of the cell.
        log: gets a line a minute where nothing is drawn; None: no lines.
    """

    def __init__(
        self,
        progress: Progress | None,
        title: str,
        board: Board,
        key: str,
        log: IO[str] | None = None,
    ) -> None:
        self._progress, self._title, self._board, self._key = progress, title, board, key
        self._log = log
        self._start, self._share = time.monotonic(), 0.0
        #: Draws these lines at once.
        self.redraw: Callable[[], None] = lambda: None
        if progress is not None:
            self._samples = progress.add_task(title, total=None, count="", rate="")

    def phase(self, text: str) -> None:
        """Show a phase before the samples."""
        if self._progress is not None:
            self._progress.update(self._samples, description=text)
            # Redraw now: the next step may block the interpreter for seconds.
            self.redraw()

    def samples(self, finished: int, total: int) -> None:
        """Show the number of finished samples."""
        self._share, self._board.running_samples = finished / max(total, 1), finished
        if self._progress is None:
            if self._log is not None and time.monotonic() - self._board.line_time >= EVERY:
                self._write(f"{finished} of {total} samples", self._log)
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

    def _write(self, done: str, log: IO[str]) -> None:
        """Write a line with what is done and the time left, of a sweep with the counts of its cells."""
        self._board.line_time = time.monotonic()
        elapsed = self._board.line_time - self._start
        seconds_left = self._board.left(self._key, elapsed, self._share)
        end = "" if seconds_left is None else f", {clock(seconds_left)} left"
        if self._board.cells > 1:
            end = f"; {self._board.counts(seconds_left, elapsed)}"
        # A reader that has gone does not end the run.
        with suppress(OSError):
            print(plain(f"{self._title}: {done}{end}"), file=log, flush=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the lines and, for a sweep, the counts of its cells below them."""
        assert self._progress is not None
        yield self._progress
        if self._board.cells > 1:
            elapsed = time.monotonic() - self._start
            seconds_left = self._board.left(self._key, elapsed, self._share)
            yield Text(self._board.counts(seconds_left, elapsed))


@contextmanager
def cell_progress(
    title: str, board: Board, key: str = "", stream: TextIO | None = None, quiet: bool = False
) -> Iterator[CellLines]:
    """Show the progress of a cell and its sweep, on a terminal or below a notebook's cell; elsewhere a line a minute.

    Args:
        title: of the cell.
        board: of its sweep.
        key: its run key.
        stream: output; standard error if None.
        quiet: show nothing.
    """
    console = Console(file=stream or sys.stderr)
    if quiet or not (console.is_terminal or console.is_jupyter):
        yield CellLines(None, title, board, key, None if quiet else console.file)
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
    with Live(lines, console=console, transient=True, refresh_per_second=REFRESHES) as live:
        lines.redraw = live.refresh
        yield lines


def tell_finished(
    row: Mapping[str, Any], board: Board, seconds: float, stream: TextIO | None = None
) -> None:
    """Print one line on a terminal about a finished cell of a sweep; long lines wrap with an indent."""
    console = Console(file=stream or sys.stderr)
    if not console.is_terminal:
        return
    board.prompts.append((f"{name(row)} {amount(row)} {row['benchmark']}", prompt_settings(row)))
    note = prompt_notes(*zip(*board.prompts, strict=True))[-1]
    count = f"{board.ended:>{len(str(board.cells))}}/{board.cells}"
    parts = (
        f"{count}  {row['status']:<7} {clock(seconds):>7}",
        f"{board.prompts[-1][0]} {note}".rstrip(),
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
    value = row["metrics"][headline(row)]["value"]
    number = "undefined" if value is None else f"{value:.3f}"
    return f"{headline(row)} {number}{f' ({MEANS})' if is_marked(row) else ''}"
