"""Show the status of a sweep on any machine that sees its store.

Read from the store alone: rows, leases of running cells, recorded failures, and journals. The sweep is the newest of
the store, or one named by the beginning of its id (a file of `<store>/sweeps`) or by its preset. For a running cell,
`match` is the share of answers so far that equal their sample's target exactly: the metric itself is known at the end.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from espalier.harness.errors import UserError, plain, print_lines
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.runs.hints import commands as rerun_commands
from espalier.harness.runs.progress_bar import clock
from espalier.harness.runs.sweep_progress import (
    LEFT,
    STATES,
    CellProgress,
    Progress,
    progress_of,
)
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.store.run_entries import DONE, FAILED, RUNNING
from espalier.harness.store.sweep_files import find

#: Seconds between two updates.
EVERY = 2.0

COLOURS = {DONE: "green", RUNNING: "yellow", FAILED: "red", LEFT: "dim"}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Show a status; exit code 0, or 2 and one line if that fails."""
    parser = command_parser(
        "sweep", __doc__, "status", "status quickstart --watch", "status --store /shared/results"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser(
        "status", help="show finished, running, failed and remaining cells"
    )
    status.add_argument("sweep", nargs="?", help="id or its beginning, or a preset's name")
    status.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
    status.add_argument("--watch", action="store_true", help="update until no cell runs or remains")
    status.add_argument(
        "--every", type=float, default=EVERY, help=f"seconds between updates (default: {EVERY:g})"
    )
    options = parser.parse_args(argv)
    if not (options.store / "runs").is_dir():
        raise UserError(f"--store={str(options.store)!r} is not a store; valid: a folder of runs")
    if not options.every > 0:
        raise UserError(f"--every={options.every:g} must be above 0, in seconds")

    def looks() -> Iterator[Progress]:
        while True:
            progress = progress_of(options.store, find(options.store, options.sweep))
            yield progress
            if not options.watch or not (progress.count(RUNNING) or progress.count(LEFT)):
                return
            time.sleep(options.every)

    if sys.stdout.isatty():
        with Live(auto_refresh=False) as live:
            for progress in looks():
                live.update(table(progress), refresh=True)
        return 0
    printed = ""
    for progress in looks():
        # A line for each change.
        if options.watch and head(progress) != printed:
            printed = head(progress)
            print_lines(printed)
    print_lines(*lines(progress))
    return 0


def head(progress: Progress) -> str:
    """Return the summary line of a sweep's progress."""
    counts = ", ".join(f"{progress.count(state)} {state}" for state in STATES)
    rate = "" if progress.rate is None else f"; {progress.rate:.3g} samples/s"
    remaining = (
        "" if progress.seconds is None else f", {clock(progress.seconds, minutes=True)} left"
    )
    return f"{len(progress.cells)} cells: {counts}{rate}{remaining}"


def lines(progress: Progress) -> Iterator[str]:
    """Yield the status as plain text."""
    sweep = progress.sweep
    if sweep.name:
        yield plain(f"sweep {sweep.name}: run.py {shlex.join(sweep.argv)}")
    yield head(progress)
    for cell in progress.cells:
        yield plain("  ".join(filter(None, (cell.state, *_texts(progress, cell)))))
    yield from advice(progress)


def table(progress: Progress) -> Group:
    """Return the status for a terminal."""
    cells = Table("", "cell", "samples", "score", "")
    for cell in progress.cells:
        state = f"[{COLOURS[cell.state]}]{cell.state}[/]"
        cells.add_row(state, *(escape(plain(text)) for text in _texts(progress, cell)))
    return Group(escape(head(progress)), cells, *map(escape, advice(progress)))


def advice(progress: Progress) -> Iterator[str]:
    """Yield the commands that rerun exactly the failed cells."""
    failed = [cell.cell for cell in progress.cells if cell.state == FAILED]
    for command_line in rerun_commands(failed):
        yield plain(f"again: {command_line}")


def _texts(progress: Progress, cell: CellProgress) -> tuple[str, ...]:
    """Return what a line shows of a cell: its title, samples, score and note."""
    total = progress.total(cell.cell)
    count = f"{cell.answers}/{'?' if total is None else total}" if cell.answers else ""
    if cell.state == DONE:
        count = f"n={cell.answers}"
    spread = "" if cell.error is None else f" ± {cell.error:.3f}"
    score = "" if cell.score is None else f"{cell.metric} {cell.score:.3f}{spread}"
    return cell.cell.title, count, score, cell.note
