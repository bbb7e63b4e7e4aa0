"""Inspect and maintain a store of results.

`ls`: all runs. `show`: the answers of a run, its wrong ones, and changes against another run; `--pictures` draws their
kept tokens into a folder, for which it loads the model and answers these samples once more. `rm`: runs by key; --yes
moves them to the trash. `verify`: check that every row can be read and matches the answers in its journal; damaged
journal lines are moved to a file next to it. `gc`: files that are no longer needed; --yes moves them to
`<store>/.trash`, which `gc --purge` empties. `export`: all rows and their samples' scores as two small tables
(harness/store/exports.py), which can be read like a store. `sql`: a query of the tables `results`, a line for each run
and metric, and `samples`, a line for each run, sample and metric (docs/rows.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from espalier.harness.errors import UserError, plain, print_lines
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.reports.curves.terminal_tables import TerminalColumn, stacked_tables
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.store import RUN_KEY
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.answer_view import (
    BROKE,
    SAME,
    answer_lines,
    compare,
    comparison_lines,
    pair_lines,
    picture_words,
    write,
    write_table,
    wrong_answers,
)
from espalier.harness.store.files.folder_checks import below, existing_store
from espalier.harness.store.row_text import FOOTNOTE, MEANS, mark
from espalier.harness.store.run_entries import (
    HEADING,
    NAMES,
    STATES,
    RunEntry,
    count_summary,
    entries,
    select_runs,
    table_lines,
)
from espalier.harness.store.stored_answers import AnsweredRun, find_key, find_run, read_answers
from espalier.harness.store.upkeep import (
    DIRTY,
    Waste,
    commits,
    contents,
    faults,
    format_counts,
    matching_commits,
    move,
    purge,
    size_of,
    waste,
)
from espalier.harness.store.upkeep import NAME as TRASH

#: Commands that change runs: they leave alone what has not the name of a run, and links.
CHANGE = ("gc", "rm", "verify")

#: Default number of lines shown.
LIMIT = 20

#: Letters of a run's key on a terminal, if they name it.
SHORT = 8

#: Days after which a run without a row counts as abandoned.
DAYS = 30.0


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run a store command; exit code 2 and one line if that fails."""
    parser = command_parser(
        "store",
        __doc__,
        "ls --method fastv",
        "show 1f3a --wrong --against 9c02",
        "gc --store other --yes",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, meaning, arguments) in COMMANDS.items():
        subparser = commands.add_parser(name, help=meaning)
        for argument, settings in {**arguments, **STORE}.items():
            subparser.add_argument(argument, **settings)
    options = parser.parse_args(argv)
    return COMMANDS[options.command].run(options)


def _entries(options: argparse.Namespace) -> list[RunEntry]:
    if not (options.store / "runs").is_dir():
        raise UserError(f"--store={str(options.store)!r} is not a store; valid: a folder of runs")
    if options.command in CHANGE:
        below(options.store, "runs")
    if options.command in ("ls", "gc") and options.days is not None and not options.days >= 0:
        raise UserError(f"--days={options.days:g} must be at least 0")
    return [
        entry
        for entry in entries(options.store)
        if options.command not in CHANGE
        or (RUN_KEY.fullmatch(entry.key) and not entry.path.is_symlink())
    ]


def _export(options: argparse.Namespace) -> int:
    # DuckDB takes time to import, and few commands need this.
    from espalier.harness.store.exports import write_tables

    rows, size, read = write_tables(options.store, options.folder)
    print_lines(f"{options.folder}: {rows} rows, {size:,} bytes; {read} runs read")
    return 0


def _sql(options: argparse.Namespace) -> int:
    # DuckDB takes time to import, and few commands need this.
    from espalier.harness.store.exports import answer, write_answer

    store = existing_store(options.store)
    if options.out is not None:
        lines = write_answer(store, options.query, options.out)
        print_lines(f"{options.out}: {lines} lines")
        return 0
    heading, *values = answer(store, options.query)
    cells: list[Sequence[str]] = [
        ["" if value is None else str(value) for value in line] for line in values
    ]
    write_table((heading, cells), sys.stdout)
    return 0


def _ls(options: argparse.Namespace) -> int:
    all_entries = _entries(options)
    kept = select_runs(
        all_entries, {name: getattr(options, name) for name in NAMES}, options.status, options.days
    )
    lines = table_lines(kept)
    if lines and sys.stdout.isatty():
        _print_runs(
            lines, short=len({entry.key[:SHORT] for entry in all_entries}) == len(all_entries)
        )
    else:
        write_table((HEADING, lines), sys.stdout)
    print(count_summary(kept), file=sys.stderr)
    return 0


def _print_runs(lines: Sequence[Sequence[str]], short: bool) -> None:
    """Print runs on a terminal, never wider than it: tables, notes on single runs, and the meaning of the mark.

    Args:
        lines: cells in the order of `HEADING`.
        short: whether the first letters of a run's key name it.
    """
    console = Console(highlight=False)
    columns = dict(zip(HEADING, map(list, zip(*lines, strict=True)), strict=True))
    if short:
        columns["run"] = [key[:SHORT] for key in columns["run"]]
    notes = columns.pop("note")
    marks = [mark(note == MEANS) for note in notes]
    columns["score"] = list(map("".join, zip(columns["score"], marks, strict=True)))
    for part in _run_tables(columns, console.width):
        console.print(part)
    for key, note in zip(columns["run"], notes, strict=True):
        if note and note != MEANS:
            console.print(Text(plain(f"{key}: {note}")))
    if any(marks):
        console.print(FOOTNOTE)


def _run_tables(columns: Mapping[str, Sequence[str]], width: int) -> list[RenderableType]:
    """Return tables of runs; the cells that are equal in all lines are in the title."""
    shared = {
        heading: cells[0]
        for heading, cells in columns.items()
        if len(cells) > 1 and len({*cells}) == 1
    }
    title = ", ".join(f"{heading} {cell}" for heading, cell in shared.items() if cell)
    differing = {
        heading: TerminalColumn(heading, tuple(map(plain, cells)), "left")
        for heading, cells in columns.items()
        if heading not in shared
    }
    names = [differing.pop(heading) for heading in ("run", "method") if heading in differing]
    return stacked_tables(names, [[*differing.values()]], width, plain(title))


def _verify(options: argparse.Namespace) -> int:
    """Return 1 if anything is wrong, for use in scripts."""
    all_entries = _entries(options)
    wrong = 0
    for entry in all_entries:
        for fault in faults(entry, mend=not options.dry):
            print_lines(fault)
            wrong += 1
    print(f"{count_summary(all_entries)}; {wrong or 'nothing'} wrong", file=sys.stderr)
    return 1 if wrong else 0


def _gc(options: argparse.Namespace) -> int:
    entries = _entries(options)
    if options.purge:
        return _purge(options)
    rows, kept = commits(entries), None
    if options.keep_code is not None:
        kept = matching_commits(options.keep_code, rows, "--keep-code")
    removable = list(waste(options.store, entries, kept, options.days))
    _list(removable)
    removable_paths = {waste.path for waste in removable}
    remaining = [entry for entry in entries if entry.path not in removable_paths]
    summary = f"stays: {count_summary(remaining)}"
    if kept is not None:
        summary += f"; rows by commit: {format_counts(commits(remaining)) or 'none'}"
        if any(commit is not None and commit.endswith(DIRTY) for commit in kept):
            summary += f"; {DIRTY} had changes on top of its commit, and stays with it"
        if rows[None]:
            summary += "; a row without a commit stays, its code is not known"
    print(summary, file=sys.stderr)
    return _move(options, removable)


def _rm(options: argparse.Namespace) -> int:
    """Move the named runs to the trash."""
    runs = {entry.key: entry for entry in _entries(options)}
    keys = dict.fromkeys(find_key(runs, prefix, options.store) for prefix in options.keys)
    removable = [
        Waste(entry.path, entry.state, size_of(entry.path), entry.path)
        for entry in (runs[key] for key in keys)
    ]
    _list(removable)
    return _move(options, removable)


def _move(options: argparse.Namespace, removable: Sequence[Waste]) -> int:
    """Move items to the trash with `--yes`, else print what would be moved."""
    trash = options.store / TRASH
    size = sum(waste.size for waste in removable)
    if not options.yes:
        line = f"{len(removable)} may go, {size:,} bytes; --yes moves them to {trash}"
        print_lines(line, file=sys.stderr)
        return 0
    if not removable:
        print("nothing to move", file=sys.stderr)
        return 0
    moved = move(options.store, removable)
    print_lines(
        *moved.stayed,
        f"moved {moved.item_count}, {moved.size:,} bytes, to {moved.folder}; moving a folder back takes it back, "
        "gc --purge frees the disk",
        file=sys.stderr,
    )
    return 1 if moved.stayed else 0


def _purge(options: argparse.Namespace) -> int:
    if options.keep_code is not None:
        raise UserError("--purge empties the whole trash; valid: without --keep-code")
    trash_contents = contents(options.store)
    _list(trash_contents)
    if options.yes:
        print(
            f"removed {len(trash_contents)} for good, {purge(trash_contents):,} bytes",
            file=sys.stderr,
        )
    else:
        size = sum(waste.size for waste in trash_contents)
        summary = f"{len(trash_contents)} may go for good, {size:,} bytes; --yes removes them"
        print(summary, file=sys.stderr)
    return 0


def _list(items: Sequence[Waste]) -> None:
    for item in items:
        print_lines(f"{item.path}: {item.why} ({item.size:,} bytes)")


def _show(options: argparse.Namespace) -> int:
    if options.limit < 0:
        raise UserError(f"--limit={options.limit} must be at least 0")
    if options.set and options.pictures is None:
        raise UserError(f"--set={options.set[0]!r} is for --pictures; valid: with --pictures DIR")
    run = read_answers(find_run(options.store, options.key), options.metric)
    summary: list[str] = []
    drawn: dict[Key, dict[str, str]]
    if options.against is None:
        answers = wrong_answers(run) if options.wrong else list(run.answers.values())
        lines = answer_lines(answers)
        drawn = {answer.key: picture_words(answer) for answer in answers}
        description = "without full marks in" if options.wrong else "scored by"
        summary.append(
            f"{run.name}: {len(answers)} of {len(run.answers)} answers {description} {run.metric}"
        )
    else:
        other_run = read_answers(
            find_run(options.store, options.against), options.metric or run.metric
        )
        comparison = compare(run, other_run)
        changed = [pair for pair in comparison.pairs if pair.change != SAME]
        if options.wrong:
            best = run.full_marks
            changed = [pair for pair in changed if pair.ours.score != best]
        lines = pair_lines(sorted(changed, key=lambda pair: pair.change))
        summary += comparison_lines(run, other_run, comparison)
        drawn = {
            pair.ours.key: picture_words(pair.ours, pair.theirs)
            for pair in changed
            if pair.change == BROKE
        }
    if options.pictures is not None:
        summary += _draw(options, run, drawn)
    remainder = write(lines, sys.stdout, options.limit or None)
    print_lines(*filter(None, (*summary, remainder)), file=sys.stderr)
    return 0


def _draw(
    options: argparse.Namespace, run: AnsweredRun, words: Mapping[Key, Mapping[str, str]]
) -> list[str]:
    """Draw samples, at most `--limit` of them; return lines about it."""
    # It loads torch and lmms-eval, and only pictures need them.
    from espalier.harness.runs.stored_pictures import write_pictures

    first = dict(list(words.items())[: options.limit or None])
    if not first:
        return ["no sample to draw"]
    return write_pictures(run, first, options.store, options.pictures, options.set)


class StoreCommand(NamedTuple):
    """A subcommand: what it does, its help text, and its arguments as argparse takes them."""

    run: Callable[[argparse.Namespace], int]
    meaning: str
    arguments: Mapping[str, Mapping[str, Any]]


#: An argument of all commands, and one of those that move files.
STORE = {"--store": {"type": Path, "default": DEFAULT_STORE, "help": "the run store"}}
YES = {
    "--yes": {"action": "store_true", "help": "move it to the trash (default: only list it)"},
}

COMMANDS: Mapping[str, StoreCommand] = {
    "export": StoreCommand(
        _export,
        "rows and scores as tables",
        {"folder": {"type": Path, "help": "output folder, such as results/demo"}},
    ),
    "sql": StoreCommand(
        _sql,
        "answer a query of results and scores",
        {
            "query": {"help": "select ... from results, or from samples"},
            "--out": {
                "type": Path,
                "metavar": "FILE",
                "help": "write the answer there: .csv, .json or .parquet",
            },
        },
    ),
    "show": StoreCommand(
        _show,
        "answers of a finished run",
        {
            "key": {"help": "run key, or its beginning"},
            "--wrong": {"action": "store_true", "help": "only answers without full marks"},
            "--against": {
                "metavar": "KEY",
                "help": "a run to compare with, such as the unpruned model's",
            },
            "--metric": {"help": "metric of the scores (default: the row's headline)"},
            "--limit": {
                "type": int,
                "default": LIMIT,
                "help": f"number of lines, 0 for all (default: {LIMIT})",
            },
            "--pictures": {
                "type": Path,
                "metavar": "DIR",
                "help": "write these samples' pictures with the kept tokens there; with --against those that broke",
            },
            "--set": {
                "action": "append",
                "default": [],
                "metavar": "KEY=VALUE",
                "help": "an override that the row does not hold, such as model.path=..., for --pictures; repeatable",
            },
        },
    ),
    "rm": StoreCommand(
        _rm,
        "list or remove runs by key",
        {
            "keys": {"nargs": "+", "metavar": "key", "help": "run key, or its beginning"},
            **YES,
        },
    ),
    "ls": StoreCommand(
        _ls,
        "all runs, oldest first",
        {
            **{f"--{name}": {"help": f"only rows of this {name}"} for name in NAMES},
            "--status": {"help": f"only runs in this state: {', '.join(STATES)}"},
            "--days": {"type": float, "help": "only runs that changed in this number of days"},
        },
    ),
    "verify": StoreCommand(
        _verify,
        "check rows and journals",
        {"--dry": {"action": "store_true", "help": "do not move damaged lines"}},
    ),
    "gc": StoreCommand(
        _gc,
        "list or remove what is not needed",
        {
            **YES,
            "--days": {
                "type": float,
                "default": DAYS,
                "help": f"age in days of abandoned runs (default: {DAYS:g})",
            },
            "--keep-code": {
                "metavar": "COMMIT",
                "action": "append",
                "help": "also remove rows of all other commits; at least four characters of it; repeatable",
            },
            "--purge": {"action": "store_true", "help": "delete the contents of the trash"},
        },
    ),
}
