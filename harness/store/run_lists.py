"""The table that `ls` prints: one line per run of a store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from espalier.harness.errors import unknown_name
from espalier.harness.store.amount_text import amount_text
from espalier.harness.store.store_index import DONE, FAILED, STATES, RunEntry

HEADING = ("run", "status", "model", "method", "ratio", "benchmark", "n", "score", "age", "note")

#: Columns by which rows can be selected.
NAMES = ("model", "method", "benchmark")


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
        if value not in valid:
            raise unknown_name(f"--{name}", value, valid)
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
