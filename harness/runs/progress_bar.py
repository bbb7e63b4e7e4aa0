"""What moves on the terminal while a cell runs: its phase, its samples, and how long the sweep still takes."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from espalier.harness.runs.forecast import Forecast, clock
from espalier.harness.runs.sweep_board import Board, headline
from espalier.harness.specs.comparable import name
from espalier.harness.store.unparsed_mark import MEANS, is_marked


class TimeLeft(ProgressColumn):
    """Says how long a line still takes, asked anew whenever it is drawn; before that is known, for how long it went."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        left = task.fields["left"]()
        if left is None:
            return Text(clock(task.elapsed or 0.0))
        return Text(f"{clock(left)} left")


class Shown:
    """The lines of one cell.

    Args:
        progress: what draws them; None where there is no terminal.
        title: what is said of the cell while its samples run.
        board: of the sweep of which the cell is a part.
        key: of the cell's run.
    """

    def __init__(self, progress: Progress | None, title: str, board: Board, key: str) -> None:
        self._progress, self._title, self._board, self._key = progress, title, board, key
        self._start, self._share = time.monotonic(), 0.0
        self._redraw: Callable[[], None] = lambda: None
        sweep = board.forecast
        if progress is not None:
            self._samples = self._line(progress, title, None, self._samples_left)
            if sweep.cells > 1:
                cells = self._line(progress, "whole sweep", sweep.cells, self._sweep_left)
                progress.update(
                    cells, completed=sweep.cell - 1, count=f"{sweep.cell}/{sweep.cells}"
                )

    def drawn_by(self, live: Live) -> None:
        """Take what draws these lines."""
        self._redraw = live.refresh

    def phase(self, text: str) -> None:
        """Say what is done before samples are counted."""
        if self._progress is not None:
            self._progress.update(self._samples, description=text)
            # Drawn at once: what follows may hold the interpreter for seconds.
            self._redraw()

    def samples(self, finished: int, total: int) -> None:
        """Say how many samples are finished."""
        self._share, self._board.here = finished / max(total, 1), finished
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
        """Draw the lines, and below those of a cell of a sweep its board."""
        assert self._progress is not None
        yield self._progress
        if self._board.forecast.cells > 1:
            yield Text(self._board.counts(self._sweep_left(), self._elapsed))
            yield self._board


@contextmanager
def shown(
    title: str, board: Board, key: str = "", stream: TextIO | None = None, quiet: bool = False
) -> Iterator[Shown]:
    """Show how a cell goes on and how far its sweep is; silent where there is no terminal.

    Args:
        title: what the cell is called.
        board: of the sweep of which it is a part.
        key: of its run.
        stream: where; standard error if None.
        quiet: whether to show nothing at all.
    """
    console = Console(file=stream or sys.stderr)
    if quiet or not console.is_terminal:
        yield Shown(None, title, board, key)
        return
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("{task.description}", table_column=text),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[count]}", justify="right"),
        TextColumn("{task.fields[rate]}", justify="right"),
        TimeLeft(),
    )
    lines = Shown(Progress(*columns, console=console, expand=True), title, board, key)
    with Live(lines, console=console, transient=True, refresh_per_second=4) as live:
        lines.drawn_by(live)
        yield lines


def tell_finished(
    row: Mapping[str, Any], sweep: Forecast, seconds: float, stream: TextIO | None = None
) -> None:
    """Print one line on a terminal about a cell of a sweep that is done; a long one goes on below, indented."""
    console = Console(file=stream or sys.stderr)
    if not console.is_terminal:
        return
    count = f"{sweep.cell:>{len(str(sweep.cells))}}/{sweep.cells}"
    parts = (
        f"{count}  {row['status']:<7} {clock(seconds):>7}",
        f"{name(row)} {row['ratio']:g} {row['benchmark']}",
        score(row),
        f"n={row['n_samples']}",
    )
    indent = " " * (len(count) + 2)
    lines = textwrap.wrap(
        "  ".join(parts), console.width, subsequent_indent=indent, break_on_hyphens=False
    )
    print("\n".join(lines), file=stream or sys.stderr, flush=True)


def score(row: Mapping[str, Any]) -> str:
    """Return the metric that a row is read by, with its value."""
    name = headline(row)
    value = row["metrics"][name]["value"]
    number = "undefined" if value is None else f"{value:.3f}"
    return f"{name} {number}{f' ({MEANS})' if is_marked(row) else ''}"
