"""Show the status of a sweep on any machine that sees its store.

Read from the store alone: rows, leases of running cells, recorded failures, and journals. The sweep is the newest of
the store, or one named by the beginning of its id (a file of `<store>/sweeps`) or by its preset. For a running cell,
`match` is the share of answers so far that equal their sample's target exactly: the metric itself is known at the end.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from espalier.harness.errors import UserError, plain, print_lines
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.runs.hints import commands as rerun_commands
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
    try:
        if not (options.store / "runs").is_dir():
            raise UserError(
                f"--store={str(options.store)!r} is not a store; valid: a folder of runs"
            )
        if not options.every > 0:
            raise UserError(f"--every={options.every:g} must be above 0, in seconds")

        def look() -> Progress:
            return progress_of(options.store, find(options.store, options.sweep))

        _watch(look, options.every) if options.watch else _show(look())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe, as `| head` does; nothing more can be written, not even at exit.
        sys.stdout = None
    return 0


def _show(progress: Progress) -> None:
    if sys.stdout.isatty():
        Console().print(table(progress))
    else:
        print_lines(*lines(progress))


def _watch(look: Callable[[], Progress], every: float) -> None:
    """Update the status repeatedly; without a terminal print one line for each change."""
    progress, printed = look(), ""
    if sys.stdout.isatty():
        with Live(table(progress), auto_refresh=False) as live:
            while progress.count(RUNNING) or progress.count(LEFT):
                time.sleep(every)
                progress = look()
                live.update(table(progress), refresh=True)
        return
    while True:
        if head(progress) != printed:
            printed = head(progress)
            print_lines(printed)
        if not (progress.count(RUNNING) or progress.count(LEFT)):
            break
        time.sleep(every)
        progress = look()
    print_lines(*lines(progress))


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
        yield plain(f"sweep {sweep.name}: run.py {shlex.join(sweep.argv)}")
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
    for command_line in rerun_commands(failed):
        yield plain(f"again: {command_line}")


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


if __name__ == "__main__":
    sys.exit(main())
