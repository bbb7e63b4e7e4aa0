"""Texts of a row in labels and tables: the amount that a run removes, and the mark of rows with many unread answers."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any


def amount_text(ratio: float, keep: int | None) -> str:
    """Return the share of visual tokens removed, `0.9`; or the tokens that stay where these are set, `64 tokens`."""
    return f"{ratio:g}" if keep is None else f"{keep} token{'s' if keep > 1 else ''}"


#: Settings of a row that word and frame its questions, by block.
PROMPTS = {"benchmark": ("prompt", "text"), "model": ("conversation", "prompt", "template")}


def prompt_settings(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a row that word and frame its questions, as text by key."""
    settings = row.get("settings") or {}
    return {
        f"{block}.{name}": json.dumps(value)
        for block, names in PROMPTS.items()
        for name in names
        if (value := (settings.get(block) or {}).get(name)) is not None
    }


def prompt_notes(names: Sequence[Hashable], prompts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return for each row the settings of its prompt in which rows of its name differ; empty where they agree.

    Args:
        names: of the rows; several may be equal.
        prompts: `prompt_settings` of each.
    """
    alike: dict[Hashable, set[tuple[tuple[str, str], ...]]] = {}
    for name, prompt in zip(names, prompts, strict=True):
        alike.setdefault(name, set()).add(tuple(prompt.items()))
    return [
        " ".join(
            f"{key}={value}"
            for key, value in prompt.items()
            if any((key, value) not in pairs for pairs in alike[name])
        )
        for name, prompt in zip(names, prompts, strict=True)
    ]


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
