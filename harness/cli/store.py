"""What a store holds: `python -m espalier store ls | show <key> | verify | gc | export <folder>`.

`ls`: all runs. `show`: the answers of one, its wrong ones, what it broke and mended. `verify`: whether every row can be
read and is of the answers in its journal; damaged lines of journals go to a file beside them. `gc`: what nobody needs
any more; with --yes it moves to `<store>/.trash`, which `gc --purge` empties. `export`: all rows and the scores of
their samples as two small tables (harness/store/parquet_tables.py), which every reader of a store takes in its place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from espalier.harness.errors import UserError, plain
from espalier.harness.paths import ROOT
from espalier.harness.specs.commands import command
from espalier.harness.store.answer_changes import SAME, compare
from espalier.harness.store.answer_view import (
    answer_lines,
    comparison_lines,
    pair_lines,
    write,
    write_table,
    wrong_answers,
)
from espalier.harness.store.commits import DIRTY, format_counts, matching_commits
from espalier.harness.store.run_lists import HEADING, NAMES, count_summary, select_runs, table_cells
from espalier.harness.store.store_index import STATES, RunEntry, entries
from espalier.harness.store.stored_answers import find_run, read_answers
from espalier.harness.store.trash import NAME as TRASH
from espalier.harness.store.trash import Waste, contents, move, purge
from espalier.harness.store.upkeep import commits, faults, waste

#: Lines that are shown unless asked otherwise.
LIMIT = 20

#: Days after which a run without a row counts as abandoned.
DAYS = 30.0


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Show answers; exit code 2 and one line if that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m espalier store", description=__doc__)
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
    ls = commands.add_parser("ls", help="all runs, the oldest first")
    for name in NAMES:
        ls.add_argument(f"--{name}", help="rows of this one alone")
    ls.add_argument("--status", help=f"runs in this state alone: {', '.join(STATES)}")
    ls.add_argument("--days", type=float, help="runs that changed in so many days alone")
    verify = commands.add_parser("verify", help="are rows and journals whole")
    verify.add_argument("--dry", action="store_true", help="leave damaged lines where they are")
    gc = commands.add_parser("gc", help="what may go")
    gc.add_argument("--yes", action="store_true", help="move it; else it is only listed")
    gc.add_argument("--days", type=float, default=DAYS, help=f"age of the abandoned ({DAYS:g})")
    gc.add_argument(
        "--keep-code",
        metavar="COMMIT",
        action="append",
        help="rows of any other commit go as well; four letters or more of it, may be repeated",
    )
    gc.add_argument("--purge", action="store_true", help="what gc moved away before, for good")
    for asked in (show, export, ls, verify, gc):
        asked.add_argument("--store", type=Path, default=ROOT / "results", help="the run store")
    options = parser.parse_args(argv)
    return COMMANDS[options.command](options)
    return 0


def _found(options: argparse.Namespace) -> list[RunEntry]:
    if not (options.store / "runs").is_dir():
        raise UserError(f"--store={str(options.store)!r} is no store; valid: a folder of runs")
    if options.command != "verify" and options.days is not None and not options.days >= 0:
        raise UserError(f"--days={options.days:g} must be at least 0")
    return entries(options.store)


def _export(options: argparse.Namespace) -> int:
    # Its writer of tables takes a moment to import, and no other command needs it.
    from espalier.harness.store.parquet_export import write_tables

    rows, size, read = write_tables(options.store, options.folder)
    print(f"{plain(str(options.folder))}: {rows} rows, {size:,} bytes; {read} runs read")
    return 0


def _ls(options: argparse.Namespace) -> int:
    found = _found(options)
    kept = select_runs(
        found, {name: getattr(options, name) for name in NAMES}, options.status, options.days
    )
    write_table((HEADING, [table_cells(entry) for entry in kept]), sys.stdout)
    print(count_summary(kept), file=sys.stderr)
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Return 1 if anything is wrong: whoever calls this in a script wants to know."""
    found = _found(options)
    wrong = 0
    for entry in found:
        for fault in faults(entry, mend=not options.dry):
            print(plain(fault))
            wrong += 1
    print(f"{count_summary(found)}; {wrong or 'nothing'} wrong", file=sys.stderr)
    return 1 if wrong else 0


def _gc(options: argparse.Namespace) -> int:
    entries = _found(options)
    if options.purge:
        return _purge(options)
    rows, kept = commits(entries), None
    if options.keep_code is not None:
        kept = matching_commits(options.keep_code, rows, "--keep-code")
    found = list(waste(options.store, entries, kept, options.days))
    _list(found)
    goes = {waste.path for waste in found}
    stays = [entry for entry in entries if entry.path not in goes]
    told = f"stays: {count_summary(stays)}"
    if kept is not None:
        told += f"; rows by commit: {format_counts(commits(stays)) or 'none'}"
        if any(commit is not None and commit.endswith(DIRTY) for commit in kept):
            told += f"; {DIRTY} had changes on top of its commit, and stays with it"
        if rows[None]:
            told += "; a row without a commit stays, its code is not known"
    print(told, file=sys.stderr)
    trash = options.store / TRASH
    size = sum(waste.size for waste in found)
    if not options.yes:
        print(f"{len(found)} may go, {size:,} bytes; --yes moves them to {trash}", file=sys.stderr)
        return 0
    if not found:
        print("nothing to move", file=sys.stderr)
        return 0
    moved = move(options.store, found)
    for reason in moved.stayed:
        print(reason, file=sys.stderr)
    print(
        f"moved {moved.item_count}, {moved.size:,} bytes, to {moved.folder}; moving a folder back takes it back, "
        "gc --purge frees the disk",
        file=sys.stderr,
    )
    return 1 if moved.stayed else 0


def _purge(options: argparse.Namespace) -> int:
    if options.keep_code is not None:
        raise UserError("--purge empties the whole trash; valid: without --keep-code")
    found = contents(options.store)
    _list(found)
    if options.yes:
        print(f"removed {len(found)} for good, {purge(found):,} bytes", file=sys.stderr)
    else:
        size = sum(waste.size for waste in found)
        told = f"{len(found)} may go for good, {size:,} bytes; --yes removes them"
        print(told, file=sys.stderr)
    return 0


def _list(found: Sequence[Waste]) -> None:
    for part in found:
        print(plain(f"{part.path}: {part.why} ({part.size:,} bytes)"))


def _show(options: argparse.Namespace) -> int:
    if options.limit < 0:
        raise UserError(f"--limit={options.limit} must be at least 0")
    ours = read_answers(find_run(options.store, options.key), options.metric)
    said: list[str] = []
    if options.against is None:
        answers = wrong_answers(ours) if options.wrong else list(ours.answers.values())
        lines = answer_lines(answers)
        what = "without full marks in" if options.wrong else "scored by"
        said.append(
            f"{ours.name}: {len(answers)} of {len(ours.answers)} answers {what} {ours.metric}"
        )
    else:
        theirs = read_answers(
            find_run(options.store, options.against), options.metric or ours.metric
        )
        found = compare(ours, theirs)
        changed = [pair for pair in found.pairs if pair.change != SAME]
        if options.wrong:
            best = ours.full_marks
            changed = [pair for pair in changed if pair.ours.score != best]
        lines = pair_lines(sorted(changed, key=lambda pair: pair.change))
        said += comparison_lines(ours, theirs, found)
    more = write(lines, sys.stdout, options.limit or None)
    for text in filter(None, (*said, more)):
        print(plain(text), file=sys.stderr)
    return 0


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "export": _export,
    "gc": _gc,
    "ls": _ls,
    "show": _show,
    "verify": _verify,
}


if __name__ == "__main__":
    sys.exit(main())
