"""What a store holds, in short, for commands that look at thousands of runs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.store import failures
from espalier.harness.store.files.lease import LEASE, Terms, file_time, look
from espalier.harness.store.row_blocks import Row
from espalier.harness.store.row_reader import walk
from espalier.harness.store.unparsed_mark import MEANS, is_marked

DONE, DAMAGED, RUNNING, FAILED, UNFINISHED = "done", "damaged", "running", "failed", "unfinished"
STATES = (DONE, DAMAGED, RUNNING, FAILED, UNFINISHED)

#: What summaries are of.
BLOCKS = (
    *("model", "method", "benchmark", "ratio", "n_samples", "metrics", "extra.headline"),
    *("extra.label", "extra.samples_per_second", "extra.environment", "extra.unparsed"),
)


@dataclass(frozen=True)
class Entry:
    """One run of a store.

    Attributes:
        path: its folder.
        state: one of `STATES`.
        summary: of a row that is there: what it is of and its headline; of a damaged one `problem`, of a failed run
            `cause`, of a running one who computes it.
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


def entries(store: Path, only: Collection[str] | None = None) -> list[Entry]:
    """Return the runs of a store that have a folder, ordered by key; with `only`, those of these keys."""
    now, listed = _now(store), []
    for run in walk(store, BLOCKS, only):
        if run.problem is not None:
            told: Mapping[str, Any] = {"problem": str(run.problem)}
            listed.append(Entry(run.path, DAMAGED, told, run.committed))
        elif run.row is not None:
            listed.append(Entry(run.path, DONE, _summary(run.row), run.committed))
        else:
            listed += unfinished(run.path, now)
    return listed


def unfinished(path: Path, now: float) -> list[Entry]:
    """Return a run without a row, nothing where it has been removed meanwhile.

    Args:
        path: its folder.
        now: the time by the file system's clock.
    """
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:
        return []
    try:
        seen = look(path / LEASE)
    except UserError as error:
        return [Entry(path, DAMAGED, {"problem": str(error)}, changed)]
    if seen is not None and now - seen.beaten <= seen.expiry(Terms().expiry):
        return [Entry(path, RUNNING, {**seen.owner, "beaten": seen.beaten}, changed)]
    failure = failures.read(path)
    if failure is not None:  # until it is tried again and ends
        return [Entry(path, FAILED, failure, changed)]
    return [Entry(path, UNFINISHED, {}, changed)]


def _now(store: Path) -> float:
    """Return the time by the file system's clock; by this machine's where nothing can be written."""
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
        **{one: row[one] for one in ("model", "method", "benchmark", "ratio", "n_samples")},
        "label": extra.get("label") or "",
        "metric": name,
        "value": score.get("value"),
        "stderr": score.get("stderr"),
        "note": MEANS if is_marked(row) else "",
        "rate": extra.get("samples_per_second"),
        "commit": commit if isinstance(commit, str) else None,
    }
