"""Texts of a row in labels and tables: the amount that a run removes, and the mark of rows with many unread answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def amount_text(ratio: float, keep: int | None) -> str:
    """Return the share of visual tokens removed, `0.9`; or the tokens that stay where these are set, `64 tokens`."""
    return f"{ratio:g}" if keep is None else f"{keep} token{'s' if keep > 1 else ''}"


#: Share of the answers above which a row is marked.
LIMIT = 0.05

MARK = "‡"
#: The meaning of the mark, for footnotes.
MEANS = f"more than {100 * LIMIT:g} % of the answers could not be read"
FOOTNOTE = f"{MARK} {MEANS}"


def too_many(unparsed: int | None, samples: int) -> bool | None:
    """Return whether a row is marked; None if its benchmark does not report unparsed answers."""
    return None if unparsed is None else unparsed > LIMIT * samples


def is_marked(row: Mapping[str, Any]) -> bool:
    """Return whether a row of any schema version is marked."""
    return bool(too_many(row.get("extra", {}).get("unparsed"), row["n_samples"]))


def mark(marked: bool) -> str:
    """Return the suffix of a score: the mark or nothing."""
    return MARK if marked else ""
