"""Conditions that a store must meet after all kills: each cell once, complete, as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.harness.store import Store
from espalier.harness.store.answer_digest import Key, journal_answers, matches_row

#: What differs between two runs of the same cell: when and how fast it ran, and how often it was begun.
MEASURED = ("time", "memory", "status")
OF_EXTRA = (
    "time_iqr",
    "samples_per_second",
    "reading_ms",
    "resumed_samples",
    "environment",
    "latency",
)


def lasting(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a row that does not depend on how the run went."""
    kept = {name: value for name, value in row.items() if name not in MEASURED}
    kept["extra"] = {name: value for name, value in row["extra"].items() if name not in OF_EXTRA}
    return kept


def faults(
    store: Path, reference: Path, keys: Sequence[str], acknowledged: Sequence[str]
) -> Iterator[str]:
    """Yield what is wrong, a line each.

    Args:
        store: of the sweep that was killed.
        reference: of the one that was not.
        keys: of the cells.
        acknowledged: `<run> <document>` of each answer with a completed append.
    """
    if sorted(path.name for path in (store / "runs").iterdir()) != sorted(keys):
        yield "the store has other runs than the sweep"
    answers: dict[str, dict[Key, str]] = {}
    for key in keys:
        run, reference_run = Store(store).run(key), Store(reference).run(key)
        row, expected = run.row(complete=True), reference_run.row(complete=True)
        if row is None or expected is None:
            yield f"{key}: no row"
            continue
        if lasting(row) != lasting(expected):
            yield f"{key}: the row differs from the uninterrupted sweep's"
        entries = run.journal.entries()
        answers[key] = journal_answers(entries)
        if json.dumps(sorted(answers[key].items())) != json.dumps(
            sorted(journal_answers(reference_run.journal.entries()).items())
        ):
            yield f"{key}: the answers differ from the uninterrupted sweep's"
        repeated = {key for entry in reversed(entries) for key in journal_answers([entry]).items()}
        if repeated != set(answers[key].items()):
            yield f"{key}: a sample that was answered twice has two answers"
        if not matches_row(row, entries):
            yield f"{key}: the row is not of the answers in its journal"
        names = {path.name for path in run.path.iterdir()}
        strange = {name for name in names if not name.endswith((".jsonl", ".json"))}
        if strange - {"lock"} or "failed.json" in names:
            yield f"{key}: left behind: {sorted(strange)}"
    for line in dict.fromkeys(acknowledged):
        key, doc_id = line.split()
        if int(doc_id) not in {number for _, number in answers.get(key, {})}:
            yield f"{key}: answer {doc_id} was acknowledged and is lost"
    yield from (f"left behind: {path}" for path in store.rglob(".*"))
