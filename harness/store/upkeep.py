"""The work of `gc` and `verify`: which files of a store may be removed, and whether its runs are intact.

Rows are selected by commit: they store the output of `git describe`, and users type any prefix.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from espalier.harness.errors import FOREIGN, StoreLost, UserError, first_words, tell_once
from espalier.harness.store import RunDir, Unreadable
from espalier.harness.store.answer_digest import journal_answers, matches_row
from espalier.harness.store.claims import claim, temporaries
from espalier.harness.store.files import durable
from espalier.harness.store.files.folder_checks import below
from espalier.harness.store.files.journal import parse, read_lines
from espalier.harness.store.files.lease import (
    DEFAULT_TERMS,
    LEASE,
    STALE_FACTOR,
    file_time,
    read_lease,
)
from espalier.harness.store.run_entries import DAMAGED, DONE, RUNNING, RunEntry

NAME = ".trash"

#: Names of the folders that `gc` makes there.
FOLDER = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(-\d+)?")


class Waste(NamedTuple):
    """A file or a folder that is no longer needed.

    Attributes:
        path: the file or folder.
        why: the reason.
        size: its bytes.
        run: the folder of the run that must not be computed while it is moved; None if that does not matter.
    """

    path: Path
    why: str
    size: int
    run: Path | None = None


class MoveResult(NamedTuple):
    """The result of a move: target folder, number of items, their bytes, and reasons for items that stayed."""

    folder: Path
    item_count: int
    size: int
    stayed: Sequence[str]


def move(store: Path, waste_items: Iterable[Waste]) -> MoveResult:
    """Move items out of a store into a new folder of its trash; items that cannot be moved stay and are listed.

    Raises:
        UserError: the trash cannot be written.
    """
    folder = _new_folder(store)
    count = size = 0
    stayed = []
    for waste in waste_items:
        target = folder / waste.path.relative_to(store)
        try:
            # Skip runs that a process computes now, on this machine or, by their leases, on another.
            holding = (
                nullcontext(True) if waste.run is None else claim(waste.run, 0.0, DEFAULT_TERMS, ())
            )
            with holding as claimed:
                if not claimed:
                    stayed.append(f"{waste.path}: stays, a command computes the run now")
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(waste.path, target)
            if waste.run == waste.path:
                # Lock files of the claim that this process held a moment ago.
                for name in (LEASE, "lock"):
                    (target / name).unlink(missing_ok=True)
        except FileNotFoundError:  # another command has removed it
            continue
        except (OSError, shutil.Error, StoreLost, UserError) as error:
            stayed.append(f"{waste.path}: stays, it cannot be moved ({first_words(error)})")
            continue
        count, size = count + 1, size + waste.size
    with suppress(OSError):  # it is not empty
        folder.rmdir()
    return MoveResult(folder, count, size, stayed)


def contents(store: Path) -> list[Waste]:
    """Return the content of the trash, a folder for each `gc`, the oldest first; nothing else that lies there.

    Raises:
        UserError: the trash is a link, or cannot be read.
    """
    try:
        folders = sorted(below(store, NAME).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unusable(store, error) from error
    return [
        Waste(path, "moved there by gc", size_of(path))
        for path in folders
        if FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def purge(waste_items: Iterable[Waste]) -> int:
    """Remove items of the trash; return the bytes.

    Raises:
        StoreLost: an item cannot be removed.
    """
    freed = 0
    for waste in waste_items:
        try:
            shutil.rmtree(waste.path)
        except OSError as error:
            raise StoreLost(
                f"store: {waste.path} cannot be removed: {first_words(error)}; {freed:,} bytes were freed before"
            ) from error
        freed += waste.size
    return freed


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all readable files below a folder; links are not followed."""
    paths = [path]
    for folder, _, names in os.walk(path):
        paths += [Path(folder, name) for name in names]
    total = 0
    for file in paths:
        try:
            total += 0 if file.is_dir() else file.lstat().st_size
        except OSError:
            continue
    return total


def _new_folder(store: Path) -> Path:
    """Return a new folder of the trash."""
    # Two commands of one second have one each.
    name = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{time.time_ns() % 10**9}"
    folder = below(store, NAME) / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _unusable(store, error) from error
    return folder


def _unusable(store: Path, error: OSError) -> UserError:
    return UserError(
        f"store: {store / NAME} cannot be used ({first_words(error)}); valid: a folder that you may write"
    )


#: Damaged lines are moved to a file with the journal's name and this suffix.
QUARANTINE = ".damaged"

#: Tolerance of a recomputed mean: sums in another order round differently.
ROUNDING = 1e-9

#: Suffix of a commit with uncommitted changes on top.
DIRTY = "-dirty"

#: Minimum number of letters of a commit.
SHORTEST = 4

#: Output of `git describe` for a commit after a tag: `v0.1-3-g88e34e31ee17`.
DESCRIBED = re.compile(r".+-\d+-g(?P<hash>[0-9a-f]+)")
HASH = re.compile(rf"[0-9a-f]{{{SHORTEST},}}")

#: Maximum number of commits in an error line.
NAMED = 8


def commits(runs: Iterable[RunEntry]) -> Counter[str | None]:
    """Return the number of rows of each commit."""
    return Counter(entry.summary["commit"] for entry in runs if entry.state == DONE)


def waste(
    store: Path, runs: Sequence[RunEntry], kept_commits: frozenset[str] | None, days: float
) -> Iterator[Waste]:
    """Yield what may be removed from a store; runs that are being computed are skipped.

    Args:
        store: its folder.
        runs: its runs.
        kept_commits: keep only rows of these commits, and those without one; None: all rows.
        days: age at which a run without a row counts as abandoned.

    Raises:
        StoreLost: the store takes no file, so that its clock cannot be read.
    """
    try:
        now = file_time(store / "runs")
    except OSError as error:
        raise StoreLost(
            f"store={str(store)!r} cannot be written: {error.strerror or error}; valid: a store of your own"
        ) from error
    for place in (store, store / "runs", store / "sweeps", store / "cells"):
        if place == store or not place.is_symlink():
            yield from _temporaries(place, now)
    for entry in runs:
        try:
            yield from _waste_of_run(entry, kept_commits, days, now)
        except FOREIGN as error:
            tell_once(f"passed over: {entry.path}: {first_words(error)}")


def _waste_of_run(
    entry: RunEntry, kept_commits: frozenset[str] | None, days: float, now: float
) -> Iterator[Waste]:
    lease = read_lease(entry.path / LEASE)
    silence = 0.0 if lease is None else now - lease.beat_time
    expiry = DEFAULT_TERMS.expiry if lease is None else lease.expiry(DEFAULT_TERMS.expiry)
    if entry.state == RUNNING or (lease is not None and silence <= expiry):
        return
    run = RunDir(entry.path)
    if entry.state == DONE and kept_commits is not None:
        commit = entry.summary["commit"]
        if commit is not None and commit not in kept_commits:
            yield _waste(entry.path, f"of code {commit}", entry.path)
            return
    old = now - entry.changed > days * 86_400
    if entry.state not in (DONE, DAMAGED) and old:
        yield _waste(entry.path, f"no row, and nothing written for {days:g} days", entry.path)
        return
    yield from _temporaries(entry.path, now)
    if lease is not None and silence > STALE_FACTOR * expiry:
        yield _waste(entry.path / LEASE, "lease of a command that is dead")
    for path in run.forced.files():
        if now - path.stat().st_mtime > days * 86_400:
            yield _waste(path, f"journal of a forced run, abandoned for {days:g} days", entry.path)


def _temporaries(folder: Path, now: float) -> Iterator[Waste]:
    try:
        for path, _ in temporaries(folder):
            if now - path.lstat().st_mtime > STALE_FACTOR * DEFAULT_TERMS.expiry:
                yield _waste(path, "temporary file of a writer that is dead")
    except FileNotFoundError:
        return
    except OSError as error:
        tell_once(f"passed over: {folder}: {first_words(error)}")


def _waste(path: Path, why: str, run: Path | None = None) -> Waste:
    return Waste(path, why, size_of(path), run)


def faults(entry: RunEntry, mend: bool) -> Iterator[str]:
    """Yield the faults of a run, a line each.

    Args:
        entry: the run; one that is being computed is skipped.
        mend: whether to move damaged lines of its journals to `<journal>.damaged`.
    """
    if entry.state == RUNNING:
        return
    if entry.state == DAMAGED and not RunDir(entry.path).finished:
        yield entry.summary["problem"]
        return
    run = RunDir(entry.path)
    try:
        row = run.row(complete=True)
    except Unreadable as error:
        yield str(error)
        row = None
    for journal in (run.journal, run.forced):
        for path in journal.files():
            yield from _damaged_lines(path, mend)
    if row is None:
        return
    try:
        entries = run.journal.entries()
    except UserError:  # reported above
        return
    answers = journal_answers(entries)
    if len(answers) < row["n_samples"]:
        yield f"{entry.path}: the journal has {len(answers)} answers, the row is of {row['n_samples']}"
    elif matches_row(row, entries) is False:
        yield f"{entry.path}: the answers in the journal are not those that the row is of"
    yield from _wrong_means(entry.path, row, entries)


def _damaged_lines(path: Path, mend: bool) -> Iterator[str]:
    """Yield a line if a journal has damaged lines, which are moved to a file next to it."""
    try:
        *lines, last = read_lines(path)
    except UserError as error:
        yield str(error)
        return
    damaged = [line for line in lines if line and parse(line) is None]
    if not damaged:
        return
    quarantine = path.with_name(path.name + QUARANTINE)
    problem = f"{path}: {len(damaged)} damaged lines"
    if not mend:
        yield f"{problem}; without --dry they go to {quarantine.name}"
        return
    intact = [line for line in lines if line and parse(line) is not None]
    with RunDir(path.parent).claim(0) as claimed:
        if not claimed:
            yield f"{problem}; another command computes the run now"
            return
        try:
            # Write the copy first: a kill in between loses nothing.
            former = quarantine.read_bytes() if quarantine.exists() else b""
            durable.replace(quarantine, former + b"".join(line + b"\n" for line in damaged))
            durable.replace(path, b"".join(line + b"\n" for line in intact) + last)
        except StoreLost as error:
            yield f"{problem}; {error}"
            return
    yield f"{problem}, now in {quarantine.name}; their samples are answered again if the run goes on"


def _wrong_means(path: Path, row: dict[str, Any], entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each metric of the row that is not the mean of the journal's scores."""
    scores: dict[Any, dict[str, float]] = {
        (str(entry.get("task")), str(entry.get("doc_id"))): entry["scores"]
        for entry in entries
        if isinstance(entry.get("scores"), dict)
    }
    aggregation = row["extra"].get("aggregation", {})
    for name, values in row["metrics"].items():
        values_of_metric = [
            entry_scores[name] for entry_scores in scores.values() if name in entry_scores
        ]
        if (
            aggregation.get(name, {}).get("how") != "mean"
            or not values_of_metric
            or values["value"] is None
        ):
            continue
        if not all(isinstance(score, int | float) for score in values_of_metric):
            yield f"{path}: the journal has scores of {name} that are not numbers"
            continue
        mean = fmean(values_of_metric)
        if not math.isclose(mean, values["value"], rel_tol=ROUNDING, abs_tol=ROUNDING):
            yield f"{path}: {name} is {values['value']:g} in the row, {mean:g} by the journal's scores"


def matching_commits(
    names: Iterable[str], rows: Mapping[str | None, int], option: str
) -> frozenset[str]:
    """Return the commits of rows that the names select, including those with changes on top, unless `-dirty` is given.

    Args:
        names: commits, at least four letters of each, in either case.
        rows: number of rows of each commit; None: rows without one.
        option: the option that took the names, for errors.

    Raises:
        UserError: a name is empty or too short, or selects no commit of the rows, or several.
    """
    return frozenset(commit for name in names for commit in _matching(name, rows, option))


def _matching(name: str, rows: Mapping[str | None, int], option: str) -> list[str]:
    letters = name.strip().lower()
    base = letters.removesuffix(DIRTY)
    commits = [
        commit
        for commit in rows
        if commit is not None
        and (letters == base or commit.endswith(DIRTY))
        and _means(base, commit.removesuffix(DIRTY))
    ]
    different = {commit.removesuffix(DIRTY) for commit in commits}
    if len(different) == 1:
        return commits
    if different:
        problem = f"is the beginning of {len(different)} commits; valid: more letters of one"
    elif len(base) < SHORTEST:
        problem = f"must be a commit, {SHORTEST} letters or more; valid"
    else:
        problem = "is the commit of no row, so that every row would go; valid"
    raise UserError(
        f"{option}={name!r} {problem}: {format_counts(rows) or 'none, the store has no row'}"
    )


def _means(name: str, commit: str) -> bool:
    if name == commit.lower():
        return True
    described = DESCRIBED.fullmatch(commit)
    letters = commit if described is None else described["hash"]
    return (
        HASH.fullmatch(name) is not None
        and HASH.fullmatch(letters) is not None
        and (letters.startswith(name) or name.startswith(letters))
    )


def format_counts(rows: Mapping[str | None, int]) -> str:
    """Return commits with their numbers of rows, the most frequent first."""
    counts = Counter(rows).most_common()
    lines = [f"{commit or 'no commit'} ({count})" for commit, count in counts[:NAMED]]
    suffix = f" and {len(counts) - NAMED} more" if len(counts) > NAMED else ""
    return ", ".join(lines) + suffix
