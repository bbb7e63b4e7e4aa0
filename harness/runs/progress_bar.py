"""Progress while a cell runs, on a terminal or below a notebook's cell: phase, samples, remaining time of the sweep.

A notebook gets plain text that is replaced: it needs no widgets.
"""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from espalier.harness.runs.forecast import Forecast, clock
from espalier.harness.runs.sweep_board import Board, headline
from espalier.harness.specs.comparable import amount, name
from espalier.harness.store.unparsed_mark import MEANS, is_marked

#: Updates of a display in a second.
REFRESHES = 4

#: Columns of text in a notebook.
WIDTH = 100


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
        console = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False)
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
        if left is None:
            return Text(clock(task.elapsed or 0.0))
        return Text(f"{clock(left)} left")


class CellProgress:
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
            self._samples = self._line(progress, title, None, self._samples_left)
            if sweep.cells > 1:
                cells = self._line(progress, "whole sweep", sweep.cells, self._sweep_left)
                progress.update(
                    cells, completed=sweep.cell - 1, count=f"{sweep.cell}/{sweep.cells}"
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

    def _line(
        self, progress: Progress, text: str, total: int | None, left: Callable[[], float | None]
    ) -> TaskID:
        return progress.add_task(text, total=total, count="", rate="", left=left)

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
) -> Iterator[CellProgress]:
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
        yield CellProgress(None, title, board, key)
        return
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("{task.description}", table_column=text),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[count]}", justify="right"),
        TextColumn("{task.fields[rate]}", justify="right"),
        TimeLeft(),
    )
    lines = CellProgress(Progress(*columns, console=console, expand=True), title, board, key)
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
    name = headline(row)
    value = row["metrics"][name]["value"]
    number = "undefined" if value is None else f"{value:.3f}"
    return f"{name} {number}{f' ({MEANS})' if is_marked(row) else ''}"
