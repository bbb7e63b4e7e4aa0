"""The mark of rows where too many answers could not be read: their scores say little of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Share of the answers above which a row is marked.
MOST = 0.05

MARK = "‡"
#: What the mark means, below whatever bears it.
MEANS = f"more than {100 * MOST:g} % of the answers could not be read"
FOOTNOTE = f"{MARK} {MEANS}"


def too_many(unparsed: int | None, samples: int) -> bool | None:
    """Return whether a row is marked; None where its benchmark does not tell what could not be read."""
    return None if unparsed is None else unparsed > MOST * samples


def is_marked(row: Mapping[str, Any]) -> bool:
    """Return whether a row of any version is marked."""
    return bool(too_many(row.get("extra", {}).get("unparsed"), row["n_samples"]))


def mark(marked: bool) -> str:
    """Return what stands behind a marked score."""
    return MARK if marked else ""
