"""What moves on the terminal while a cell runs: its phase, its samples, and how long the sweep still takes."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from harness.cells import name
from harness.running.forecast import Forecast


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
        sweep: of which the cell is a part.
        key: of the cell's run.
    """

    def __init__(self, progress: Progress | None, title: str, sweep: Forecast, key: str) -> None:
        self._progress, self._title, self._sweep, self._key = progress, title, sweep, key
        self._start, self._share = time.monotonic(), 0.0
        if progress is not None:
            self._samples = self._line(progress, title, None, self._samples_left)
            if sweep.cells > 1:
                cells = self._line(progress, "whole sweep", sweep.cells, self._sweep_left)
                progress.update(
                    cells, completed=sweep.cell - 1, count=f"{sweep.cell}/{sweep.cells}"
                )

    def phase(self, text: str) -> None:
        """Say what is done before samples are counted."""
        if self._progress is not None:
            # Drawn at once: what follows may hold the interpreter for seconds.
            self._progress.update(self._samples, description=text, refresh=True)

    def samples(self, finished: int, total: int) -> None:
        """Say how many samples are finished."""
        self._share = finished / max(total, 1)
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
        return self._sweep.left(self._key, time.monotonic() - self._start, self._share)


@contextmanager
def shown(
    title: str, sweep: Forecast, key: str = "", stream: TextIO | None = None, quiet: bool = False
) -> Iterator[Shown]:
    """Show how a cell goes on and how far its sweep is; silent where there is no terminal.

    Args:
        title: what the cell is called.
        sweep: of which it is a part.
        key: of its run.
        stream: where; standard error if None.
        quiet: whether to show nothing at all.
    """
    console = Console(file=stream or sys.stderr)
    if quiet or not console.is_terminal:
        yield Shown(None, title, sweep, key)
        return
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("{task.description}", table_column=text),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[count]}", justify="right"),
        TextColumn("{task.fields[rate]}", justify="right"),
        TimeLeft(),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        yield Shown(progress, title, sweep, key)


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
        headline(row),
        f"n={row['n_samples']}",
    )
    indent = " " * (len(count) + 2)
    lines = textwrap.wrap(
        "  ".join(parts), console.width, subsequent_indent=indent, break_on_hyphens=False
    )
    print("\n".join(lines), file=stream or sys.stderr, flush=True)


def headline(row: Mapping[str, Any]) -> str:
    """Return the metric that a row is read by."""
    metrics, chosen = row["metrics"], row["extra"].get("headline")
    label = chosen if chosen in metrics else next(iter(metrics))
    value = metrics[label]["value"]
    return f"{label} undefined" if value is None else f"{label} {value:.3f}"


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, without leading zeros: `9 s`, `1:09`, `2:01:09`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
