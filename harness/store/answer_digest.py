"""A digest of a run's answers, stored in its row and later compared with its journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

#: Identity of a sample inside a run: (task, doc id).
Key = tuple[str, int]


def digest_of(answers: Mapping[Key, str]) -> dict[str, Any]:
    """Return the number of answers and the SHA-256 of all, in the order of their samples."""
    hashed = hashlib.sha256()
    for (task, doc_id), answer in sorted(answers.items()):
        hashed.update(f"{json.dumps([task, doc_id, answer])}\n".encode())
    return {"samples": len(answers), "sha256": hashed.hexdigest()}


def journal_answers(entries: Iterable[Mapping[str, Any]]) -> dict[Key, str]:
    """Return the answers of a journal; a sample answered twice keeps its first answer, as in a run."""
    answers: dict[Key, str] = {}
    for entry in entries:
        task, doc_id, answer = (entry.get(name) for name in ("task", "doc_id", "answer"))
        if isinstance(task, str) and isinstance(doc_id, int) and isinstance(answer, str):
            answers.setdefault((task, doc_id), answer)
    return answers


def matches_row(row: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> bool | None:
    """Return whether a journal holds the answers of a row; None for a row of an earlier version."""
    stored = row.get("extra", {}).get("answers")
    if not stored:
        return None
    entries = list(entries)
    answers = journal_answers(entries)
    # Samples with failed scoring are not part of a row.
    scored = {
        (entry["task"], entry["doc_id"])
        for entry in entries
        if isinstance(entry.get("scores"), Mapping) and {"task", "doc_id"} <= entry.keys()
    }
    counted = {key: answer for key, answer in answers.items() if key in scored}
    return stored in (digest_of(counted), digest_of(answers))
