"""The output of `status`: counts, running and failed cells, commands to rerun those, and every cell with its score."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from espalier.harness.errors import plain
from espalier.harness.runs.status.rerun_commands import commands
from espalier.harness.runs.status.sweep_progress import LEFT, STATES, CellProgress, Progress
from espalier.harness.store.store_index import DONE, FAILED, RUNNING

COLOURS = {DONE: "green", RUNNING: "yellow", FAILED: "red", LEFT: "dim"}


def head(progress: Progress) -> str:
    """Return the summary line of a sweep's progress."""
    counts = ", ".join(f"{progress.count(state)} {state}" for state in STATES)
    rate = "" if progress.rate is None else f"; {progress.rate:.3g} samples/s"
    remaining = "" if progress.seconds is None else f", {clock(progress.seconds)} left"
    return f"{len(progress.cells)} cells: {counts}{rate}{remaining}"


def lines(progress: Progress) -> Iterator[str]:
    """Yield the status as plain text."""
    sweep = progress.sweep
    if sweep.name:
        yield plain(f"sweep {sweep.name}: run.py {' '.join(sweep.argv)}")
    yield head(progress)
    for cell in progress.cells:
        parts = (
            cell.state,
            cell.cell.title,
            _count(progress, cell),
            _score(cell),
            cell.note,
        )
        yield plain("  ".join(filter(None, parts)))
    yield from advice(progress)


def table(progress: Progress) -> Group:
    """Return the status for a terminal."""
    cells = Table("", "cell", "samples", "score", "")
    for cell in progress.cells:
        state = f"[{COLOURS[cell.state]}]{cell.state}[/]"
        texts = (
            cell.cell.title,
            _count(progress, cell),
            _score(cell),
            cell.note,
        )
        cells.add_row(state, *(escape(plain(text)) for text in texts))
    return Group(escape(head(progress)), cells, *map(escape, advice(progress)))


def advice(progress: Progress) -> Iterator[str]:
    """Yield the commands that rerun exactly the failed cells."""
    failed = [cell.cell for cell in progress.of(FAILED)]
    for command in commands(failed):
        yield plain(f"again: {command}")


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: `0:09`, `2:01:09`."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def _count(progress: Progress, cell: CellProgress) -> str:
    total = cell.answers if cell.state == DONE else progress.total(cell.cell)
    if cell.state == DONE:
        return f"n={total}"
    return "" if not cell.answers else f"{cell.answers}/{'?' if total is None else total}"


def _score(cell: CellProgress) -> str:
    if cell.score is None:
        return ""
    spread = "" if cell.error is None else f" ± {cell.error:.3f}"
    return f"{cell.metric} {cell.score:.3f}{spread}"
