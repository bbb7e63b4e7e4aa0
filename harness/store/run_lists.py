"""The runs of a store as lines of a table: what `ls` prints."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from espalier.harness.errors import unknown_name
from espalier.harness.store.store_index import DONE, FAILED, STATES, Entry

HEADING = ("run", "status", "model", "method", "ratio", "benchmark", "n", "score", "age", "note")

#: What rows may be chosen by.
NAMES = ("model", "method", "benchmark")


def chosen(
    found: Sequence[Entry], wanted: Mapping[str, str | None], status: str | None, days: float | None
) -> list[Entry]:
    """Return the runs that meet all conditions.

    Args:
        found: all runs.
        wanted: by `NAMES`, what rows must have; None: whatever. A run without a row has no names.
        status: one of `STATES`; None: any.
        days: how old they may be; None: as old as they are.

    Raises:
        UserError: no row has such a name, or there is no such status.
    """
    if status is not None and status not in STATES:
        raise unknown_name("--status", status, STATES)
    kept = list(found)
    for name, value in wanted.items():
        if value is None:
            continue
        known = {entry.summary[name] for entry in found if entry.state == DONE}
        if value not in known:
            raise unknown_name(f"--{name}", value, known)
        kept = [entry for entry in kept if entry.summary.get(name) == value]
    if status is not None:
        kept = [entry for entry in kept if entry.state == status]
    if days is not None:
        oldest = time.time() - days * 86_400
        kept = [entry for entry in kept if entry.changed >= oldest]
    return sorted(kept, key=lambda entry: entry.changed)


def line(entry: Entry) -> tuple[str, ...]:
    """Return the cells of a run in the order of `HEADING`."""
    told = entry.summary
    age = _age(time.time() - entry.changed)
    if entry.state != DONE:
        note = told.get("problem") or told.get("cause") or told.get("host") or ""
        return (entry.key, entry.state, *[""] * 6, age, str(note))
    method = f"{told['method']} {told['label']}".strip()
    score = "" if told["value"] is None else f"{told['metric']} {told['value']:.3f}"
    spread = "" if told["stderr"] is None else f" ± {told['stderr']:.3f}"
    names = (told["model"], method, f"{told['ratio']:g}", told["benchmark"])
    return (entry.key, DONE, *names, str(told["n_samples"]), score + spread, age, told["note"])


def counts(found: Sequence[Entry]) -> str:
    """Return how many runs there are of each status."""
    numbers = {state: sum(entry.state == state for entry in found) for state in STATES}
    told = ", ".join(f"{number} {state}" for state, number in numbers.items() if number)
    failed = "; --status failed shows why" if numbers[FAILED] else ""
    return f"{len(found)} runs: {told or 'none'}{failed}"


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
