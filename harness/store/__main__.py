"""What a store holds: `python -m harness.store show <key>` or `... export <folder>`.

`show`: the answers of a stored run, its wrong ones, what it broke and mended. `export`: all rows and the scores of
their samples as two small tables (harness/store/tables.py), which every reader of a store takes in its place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.paths import ROOT
from harness.store.against import SAME, compare
from harness.store.answers import find_run, read_told
from harness.store.show import answer_lines, pair_lines, verdict, write, wrong_answers
from harness.store.tables import write_tables

#: Lines that are shown unless asked otherwise.
LIMIT = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Show answers; exit code 2 and one line if that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m harness.store", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="rows and scores as tables")
    export.add_argument("folder", type=Path, help="where they go, such as results/demo")
    show = commands.add_parser("show", help="answers of a finished run")
    show.add_argument("key", help="run key, or the beginning of one")
    show.add_argument("--wrong", action="store_true", help="only answers without full marks")
    show.add_argument(
        "--against", metavar="KEY", help="a run to pair with, such as the unreduced model's"
    )
    show.add_argument("--metric", help="whose scores (default: the row's headline)")
    show.add_argument(
        "--limit", type=int, default=LIMIT, help=f"lines, 0 for all (default: {LIMIT})"
    )
    for command in (show, export):
        command.add_argument("--store", type=Path, default=ROOT / "results", help="the run store")
    options = parser.parse_args(argv)
    try:
        if options.command == "export":
            rows, size = write_tables(options.store, options.folder)
            print(f"{options.folder}: {rows} rows, {size:,} bytes")
        else:
            _show(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # As `| head` leaves; nothing more can be written, not even at exit.
        sys.stdout = None
    return 0


def _show(options: argparse.Namespace) -> None:
    if options.limit < 0:
        raise UserError(f"--limit={options.limit} must be at least 0")
    ours = read_told(find_run(options.store, options.key), options.metric)
    said: list[str] = []
    if options.against is None:
        answers = wrong_answers(ours) if options.wrong else list(ours.answers.values())
        lines = answer_lines(answers)
        what = "without full marks in" if options.wrong else "scored by"
        said.append(
            f"{ours.name}: {len(answers)} of {len(ours.answers)} answers {what} {ours.metric}"
        )
    else:
        theirs = read_told(find_run(options.store, options.against), options.metric or ours.metric)
        found = compare(ours, theirs)
        changed = [pair for pair in found.pairs if pair.change != SAME]
        if options.wrong:
            best = ours.full_marks
            changed = [pair for pair in changed if pair.ours.score != best]
        lines = pair_lines(sorted(changed, key=lambda pair: pair.change))
        said += verdict(ours, theirs, found)
    more = write(lines, sys.stdout, options.limit or None)
    for line in filter(None, (*said, more)):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
