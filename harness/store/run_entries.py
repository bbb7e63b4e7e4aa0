"""Short summaries of a store's runs, for commands that read thousands of them, and the table that `ls` prints."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.settings import choice
from espalier.harness.store import RunDir
from espalier.harness.store.files.lease import LEASE, Terms, file_time, read_lease
from espalier.harness.store.index import Row, walk
from espalier.harness.store.row_text import (
    MEANS,
    amount_text,
    is_marked,
    prompt_notes,
    prompt_settings,
)

DONE, DAMAGED, RUNNING, FAILED, UNFINISHED = "done", "damaged", "running", "failed", "unfinished"
STATES = (DONE, DAMAGED, RUNNING, FAILED, UNFINISHED)

#: Blocks of a row that a summary is made from.
BLOCKS = (
    *("model", "method", "benchmark", "ratio", "keep", "n_samples", "metrics", "extra.headline"),
    *("extra.label", "extra.samples_per_second", "extra.environment", "extra.unparsed"),
    "settings",
)

HEADING = ("run", "status", "model", "method", "ratio", "benchmark", "n", "score", "age", "note")

#: Columns by which rows can be selected.
NAMES = ("model", "method", "benchmark")


@dataclass(frozen=True)
class RunEntry:
    """One run of a store.

    Attributes:
        path: its folder.
        state: one of `STATES`.
        summary: of a run with a row: its names and its headline; of a damaged one `problem`, of a failed one `cause`,
            of a running one the owner of its lease.
        changed: when its row was committed, or its folder changed last; seconds since 1970 by the file system.
    """

    path: Path
    state: str
    summary: Mapping[str, Any]
    changed: float

    @property
    def key(self) -> str:
        """The run key."""
        return self.path.name


def entries(store: Path, only: Collection[str] | None = None) -> list[RunEntry]:
    """Return the runs of a store that have a folder, ordered by key; with `only`, those of these keys."""
    now, run_entries = _now(store), []
    for run in walk(store, BLOCKS, only):
        if run.problem is not None:
            summary: Mapping[str, Any] = {"problem": str(run.problem)}
            run_entries.append(RunEntry(run.path, DAMAGED, summary, run.committed))
        elif run.row is not None:
            run_entries.append(RunEntry(run.path, DONE, _summary(run.row), run.committed))
        else:
            run_entries += unfinished(run.path, now)
    return run_entries


def unfinished(path: Path, now: float) -> list[RunEntry]:
    """Return the entry of a run without a row; empty if the run has been removed meanwhile.

    Args:
        path: its folder.
        now: the time by the file system's clock.
    """
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:
        return []
    try:
        lease = read_lease(path / LEASE)
    except UserError as error:
        return [RunEntry(path, DAMAGED, {"problem": str(error)}, changed)]
    if lease is not None and now - lease.beat_time <= lease.expiry(Terms().expiry):
        return [RunEntry(path, RUNNING, {**lease.owner, "beaten": lease.beat_time}, changed)]
    failure = RunDir(path).failure()
    if failure is not None:  # until a new attempt ends
        return [RunEntry(path, FAILED, failure, changed)]
    return [RunEntry(path, UNFINISHED, {}, changed)]


def _now(store: Path) -> float:
    """Return the time by the file system's clock, or by this machine's if no file can be written."""
    try:
        return file_time(store / "runs")
    except OSError:
        return time.time()


def _summary(row: Row) -> dict[str, Any]:
    extra, metrics = row["extra"], row.get("metrics", {})
    headline = extra.get("headline")
    name = headline if headline in metrics else next(iter(metrics), None)
    score = metrics.get(name) or {}
    commit = (extra.get("environment") or {}).get("commit")
    return {
        **{key: row[key] for key in ("model", "method", "benchmark", "ratio", "n_samples")},
        "keep": row.get("keep"),
        "label": extra.get("label") or "",
        "metric": name,
        "value": score.get("value"),
        "stderr": score.get("stderr"),
        "note": MEANS if is_marked(row) else "",
        "prompt": prompt_settings(row),
        "rate": extra.get("samples_per_second"),
        "commit": commit if isinstance(commit, str) else None,
    }


def select_runs(
    entries: Sequence[RunEntry],
    wanted: Mapping[str, str | None],
    status: str | None,
    days: float | None,
) -> list[RunEntry]:
    """Return the runs that meet all conditions, the oldest first.

    Args:
        entries: all runs.
        wanted: by `NAMES`, the value that rows must have; None: any. A run without a row has no names.
        status: one of `STATES`; None: any.
        days: maximum age; None: any.

    Raises:
        UserError: no row has such a name, or there is no such status.
    """
    if status is not None and status not in STATES:
        raise unknown_name("--status", status, STATES)
    kept = list(entries)
    for name, value in wanted.items():
        if value is None:
            continue
        valid = {entry.summary[name] for entry in entries if entry.state == DONE}
        choice(f"--{name}", value, valid)
        kept = [entry for entry in kept if entry.summary.get(name) == value]
    if status is not None:
        kept = [entry for entry in kept if entry.state == status]
    if days is not None:
        oldest = time.time() - days * 86_400
        kept = [entry for entry in kept if entry.changed >= oldest]
    return sorted(kept, key=lambda entry: entry.changed)


def table_cells(entry: RunEntry) -> tuple[str, ...]:
    """Return the cells of a run in the order of `HEADING`."""
    summary = entry.summary
    age = _age(time.time() - entry.changed)
    if entry.state != DONE:
        note = summary.get("problem") or summary.get("cause") or summary.get("host") or ""
        return (entry.key, entry.state, *[""] * 6, age, str(note))
    method = f"{summary['method']} {summary['label']}".strip()
    score = "" if summary["value"] is None else f"{summary['metric']} {summary['value']:.3f}"
    spread = "" if summary["stderr"] is None else f" ± {summary['stderr']:.3f}"
    amount = amount_text(summary["ratio"], summary["keep"])
    names = (summary["model"], method, amount, summary["benchmark"])
    return (
        entry.key,
        DONE,
        *names,
        str(summary["n_samples"]),
        score + spread,
        age,
        summary["note"],
    )


def table_lines(entries: Sequence[RunEntry]) -> list[tuple[str, ...]]:
    """Return the cells of runs; after the method those settings of the prompt in which runs of one name differ."""
    lines = [table_cells(entry) for entry in entries]
    names, method = slice(2, 6), HEADING.index("method")
    prompts = [entry.summary.get("prompt", {}) for entry in entries]
    notes = prompt_notes([line[names] for line in lines], prompts)
    return [
        (*line[:method], f"{line[method]} {note}".rstrip(), *line[method + 1 :])
        for line, note in zip(lines, notes, strict=True)
    ]


def count_summary(entries: Sequence[RunEntry]) -> str:
    """Return the number of runs of each status as text."""
    numbers = {state: sum(entry.state == state for entry in entries) for state in STATES}
    states = ", ".join(f"{number} {state}" for state, number in numbers.items() if number)
    failed = "; --status failed shows why" if numbers[FAILED] else ""
    return f"{len(entries)} runs: {states or 'none'}{failed}"


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
