"""A digest of the answers of a run: what its row's numbers are of, to be held against its journal later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

#: Identity of a sample inside a run: (task, doc id).
Key = tuple[str, int]


def digest_of(answers: Mapping[Key, str]) -> dict[str, Any]:
    """Return how many answers there are and the SHA-256 of all, in the order of their samples."""
    hashed = hashlib.sha256()
    for (task, doc_id), answer in sorted(answers.items()):
        hashed.update(f"{json.dumps([task, doc_id, answer])}\n".encode())
    return {"samples": len(answers), "sha256": hashed.hexdigest()}


def answers_in(entries: Iterable[Mapping[str, Any]]) -> dict[Key, str]:
    """Return the answers of a journal; a sample that was answered twice keeps its first answer, as for a run."""
    found: dict[Key, str] = {}
    for entry in entries:
        task, doc_id, answer = (entry.get(name) for name in ("task", "doc_id", "answer"))
        if isinstance(task, str) and isinstance(doc_id, int) and isinstance(answer, str):
            found.setdefault((task, doc_id), answer)
    return found


def scored_in(entries: Iterable[Mapping[str, Any]]) -> set[Key]:
    """Return the samples of a journal that were scored; those whose scoring failed are in no row."""
    return {
        (entry["task"], entry["doc_id"])
        for entry in entries
        if isinstance(entry.get("scores"), Mapping) and {"task", "doc_id"} <= entry.keys()
    }


def tells(row: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> bool | None:
    """Say whether a journal holds the answers that a row is of; None for a row of an earlier version."""
    told = row.get("extra", {}).get("answers")
    if not told:
        return None
    entries = list(entries)
    answers, scored = answers_in(entries), scored_in(entries)
    counted = {key: answer for key, answer in answers.items() if key in scored}
    return told in (digest_of(counted), digest_of(answers))
