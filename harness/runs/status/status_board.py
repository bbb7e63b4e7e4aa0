"""What `status` prints: counts, what runs, what failed and how to run that again, and every cell with its score."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from espalier.harness.errors import plain
from espalier.harness.runs.status.rerun_commands import commands
from espalier.harness.runs.status.sweep_progress import LEFT, STATES, At, Progress
from espalier.harness.store.store_index import DONE, FAILED, RUNNING

COLOURS = {DONE: "green", RUNNING: "yellow", FAILED: "red", LEFT: "dim"}


def head(progress: Progress) -> str:
    """Return the line that says how far a sweep is."""
    counts = ", ".join(f"{progress.count(state)} {state}" for state in STATES)
    rate = "" if progress.rate is None else f"; {progress.rate:.3g} samples/s"
    left = "" if progress.seconds is None else f", {clock(progress.seconds)} left"
    return f"{len(progress.cells)} cells: {counts}{rate}{left}"


def lines(progress: Progress) -> Iterator[str]:
    """Yield the status as plain text."""
    sweep = progress.sweep
    if sweep.name:
        yield plain(f"sweep {sweep.name}: run.py {' '.join(sweep.argv)}")
    yield head(progress)
    for one in progress.cells:
        parts = (one.state, one.cell.title, _count(progress, one), _score(one), one.note)
        yield plain("  ".join(filter(None, parts)))
    yield from advice(progress)


def table(progress: Progress) -> Group:
    """Return the status for a terminal."""
    cells = Table("", "cell", "samples", "score", "")
    for one in progress.cells:
        state = f"[{COLOURS[one.state]}]{one.state}[/]"
        texts = (one.cell.title, _count(progress, one), _score(one), one.note)
        cells.add_row(state, *(escape(plain(text)) for text in texts))
    return Group(escape(head(progress)), cells, *map(escape, advice(progress)))


def advice(progress: Progress) -> Iterator[str]:
    """Yield the commands that run the failed cells again, and only these."""
    failed = [one.cell for one in progress.of(FAILED)]
    for command in commands(failed):
        yield plain(f"again: {command}")


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: `0:09`, `2:01:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(progress: Progress, one: At) -> str:
    total = one.answers if one.state == DONE else progress.total(one.cell)
    if one.state == DONE:
        return f"n={total}"
    return "" if not one.answers else f"{one.answers}/{'?' if total is None else total}"


def _score(one: At) -> str:
    if one.score is None:
        return ""
    spread = "" if one.error is None else f" ± {one.error:.3f}"
    return f"{one.metric} {one.score:.3f}{spread}"
