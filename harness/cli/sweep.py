"""Show the status of a sweep on any machine that sees its store.

Read from the store alone: rows, leases of running cells, recorded failures, and journals. The sweep is the newest of
the store, or one named by the beginning of its id (a file of `<store>/sweeps`) or by its preset. For a running cell,
`match` is the share of answers so far that equal their sample's target exactly: the metric itself is known at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from espalier.harness.errors import UserError
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.runs.status.status_board import head, lines, table
from espalier.harness.runs.status.sweep_progress import LEFT, Progress, progress_of
from espalier.harness.specs.command_help import command_parser
from espalier.harness.specs.commands import command
from espalier.harness.store.store_index import RUNNING
from espalier.harness.store.sweep_files import find

#: Seconds between two updates.
EVERY = 2.0


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
        print(*lines(progress), sep="\n")


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
            print(printed, flush=True)
        if not (progress.count(RUNNING) or progress.count(LEFT)):
            break
        time.sleep(every)
        progress = look()
    print(*lines(progress), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
