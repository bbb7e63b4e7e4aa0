"""What may go from a store, and whether what is there is whole: the work of `gc` and `verify`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from espalier.harness.errors import FOREIGN, StoreLost, UserError, first_words, tell_once
from espalier.harness.store import RunDir, Unreadable
from espalier.harness.store.answer_digest import answers_in, tells
from espalier.harness.store.debris import temporaries
from espalier.harness.store.files import durable
from espalier.harness.store.files.journal import parse, read_lines
from espalier.harness.store.files.lease import LEASE, LONG, USUAL, file_time, look
from espalier.harness.store.store_index import DAMAGED, DONE, RUNNING, Entry
from espalier.harness.store.trash import Waste, size_of

#: A line that is no entry goes behind this suffix of its journal.
QUARANTINE = ".damaged"

#: How far a mean may be from the one in the row: sums in another order round otherwise.
ROUNDING = 1e-9


def commits(found: Iterable[Entry]) -> Counter[str | None]:
    """Return how many rows there are of each commit."""
    return Counter(entry.summary["commit"] for entry in found if entry.state == DONE)


def waste(
    store: Path, found: Sequence[Entry], kept: frozenset[str] | None, days: float
) -> Iterator[Waste]:
    """Yield what may go from a store; runs that are computed now are left alone.

    Args:
        store: its folder.
        found: its runs.
        kept: keep only rows of these commits, and those without one; None: all rows.
        days: how old a run without a row must be to count as abandoned.

    Raises:
        StoreLost: the store takes no file, so that its clock is not known.
    """
    try:
        now = file_time(store / "runs")
    except OSError as error:
        raise StoreLost(
            f"store={str(store)!r} cannot be written: {error.strerror or error}; valid: a store of your own"
        ) from error
    for place in (store, store / "runs", store / "sweeps"):
        yield from _temporaries(place, now)
    for entry in found:
        try:
            yield from _of_run(entry, kept, days, now)
        except FOREIGN as error:
            tell_once(f"passed over: {entry.path}: {first_words(error)}")


def _of_run(entry: Entry, kept: frozenset[str] | None, days: float, now: float) -> Iterator[Waste]:
    lease = look(entry.path / LEASE)
    silence = 0.0 if lease is None else now - lease.beaten
    expiry = USUAL.expiry if lease is None else lease.expiry(USUAL.expiry)
    if entry.state == RUNNING or (lease is not None and silence <= expiry):
        return
    run = RunDir(entry.path)
    if entry.state == DONE and kept is not None:
        commit = entry.summary["commit"]
        if commit is not None and commit not in kept:
            yield _of(entry.path, f"of code {commit}", entry.path)
            return
    old = now - entry.changed > days * 86_400
    if entry.state not in (DONE, DAMAGED) and old:
        yield _of(entry.path, f"no row, and nothing written for {days:g} days", entry.path)
        return
    yield from _temporaries(entry.path, now)
    if lease is not None and silence > LONG * expiry:
        yield _of(entry.path / LEASE, "lease of a command that is dead")
    for path in run.forced.files():
        if now - path.stat().st_mtime > days * 86_400:
            yield _of(path, f"journal of a forced run, abandoned for {days:g} days", entry.path)


def _temporaries(folder: Path, now: float) -> Iterator[Waste]:
    try:
        for path, _ in temporaries(folder):
            if now - path.lstat().st_mtime > LONG * USUAL.expiry:
                yield _of(path, "temporary file of a writer that is dead")
    except FileNotFoundError:
        return
    except OSError as error:
        tell_once(f"passed over: {folder}: {first_words(error)}")


def _of(path: Path, why: str, run: Path | None = None) -> Waste:
    return Waste(path, why, size_of(path), run)


def faults(entry: Entry, mend: bool) -> Iterator[str]:
    """Yield what is wrong with a run, a line each.

    Args:
        entry: the run; one that is computed now is not looked at.
        mend: whether damaged lines of its journals go to `<journal>.damaged`.
    """
    if entry.state == RUNNING:
        return
    if entry.state == DAMAGED and not RunDir(entry.path).finished:
        yield entry.summary["problem"]
        return
    run = RunDir(entry.path)
    try:
        row = run.row(whole=True)
    except Unreadable as error:
        yield str(error)
        row = None
    for journal in (run.journal, run.forced):
        for path in journal.files():
            yield from _quarantined(path, mend)
    if row is None:
        return
    try:
        entries = run.journal.entries()
    except UserError:  # said above
        return
    answers = answers_in(entries)
    if len(answers) < row["n_samples"]:
        yield f"{entry.path}: the journal has {len(answers)} answers, the row is of {row['n_samples']}"
    elif tells(row, entries) is False:
        yield f"{entry.path}: the answers in the journal are not those that the row is of"
    yield from _other_means(entry.path, row, entries)


def _quarantined(path: Path, mend: bool) -> Iterator[str]:
    """Yield a line if a journal has damaged lines, which are moved to a file beside it."""
    try:
        *lines, last = read_lines(path)
    except UserError as error:
        yield str(error)
        return
    damaged = [line for line in lines if line and parse(line) is None]
    if not damaged:
        return
    where = path.with_name(path.name + QUARANTINE)
    told = f"{path}: {len(damaged)} damaged lines"
    if not mend:
        yield f"{told}; without --dry they go to {where.name}"
        return
    whole = [line for line in lines if line and parse(line) is not None]
    with RunDir(path.parent).claim(0) as held:
        if not held:
            yield f"{told}; another command computes the run now"
            return
        try:
            # First there twice, then once: a kill in between loses nothing.
            kept = where.read_bytes() if where.exists() else b""
            durable.replace(where, kept + b"".join(line + b"\n" for line in damaged))
            durable.replace(path, b"".join(line + b"\n" for line in whole) + last)
        except StoreLost as error:
            yield f"{told}; {error}"
            return
    yield f"{told}, now in {where.name}; their samples are answered again if the run goes on"


def _other_means(path: Path, row: dict[str, Any], entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each metric that is a mean over samples and is not the mean of the journal's scores."""
    scores: dict[Any, dict[str, float]] = {}
    for entry in entries:
        if isinstance(entry.get("scores"), dict):
            scores[str(entry.get("task")), str(entry.get("doc_id"))] = entry["scores"]
    how = row["extra"].get("aggregation", {})
    for name, values in row["metrics"].items():
        of = [one[name] for one in scores.values() if name in one]
        if how.get(name, {}).get("how") != "mean" or not of or values["value"] is None:
            continue
        if not all(isinstance(score, int | float) for score in of):
            yield f"{path}: the journal has scores of {name} that are no numbers"
            continue
        mean = fmean(of)
        if not math.isclose(mean, values["value"], rel_tol=ROUNDING, abs_tol=ROUNDING):
            yield f"{path}: {name} is {values['value']:g} in the row, {mean:g} by the journal's scores"
