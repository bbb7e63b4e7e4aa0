"""Versions of the layout of a row. A file is never rewritten: a row of an older one is lifted when it is read.

| schema | what came with it |
| --- | --- |
| 1 | the first |
| 2 | `extra.answers`: a digest of the answers that the numbers are of; no `facts.signals`, which changes no number |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]


class Newer(ValueError):
    """A file is of a version that came after this code: nothing is wrong with it, and nobody here can read it."""


#: The version that this code writes; a reader refuses a newer one.
SCHEMA = 2


def _from_first(row: Row) -> Row:
    """Return a row of version 1 as one of version 2: what its answers were is not known."""
    lifted = {**row, "extra": {"answers": None, **_table(row.get("extra"))}}
    if isinstance(row.get("settings"), Mapping):
        lifted["settings"] = {
            name: _without_signals(value) if name in ("model", "draft") else value
            for name, value in row["settings"].items()
        }
    return lifted


def _without_signals(side: Any) -> Any:
    facts = _table(_table(side).get("facts"))
    kept = {name: value for name, value in facts.items() if name != "signals"}
    return {**side, "facts": kept} if facts else side


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


#: By version: what makes it a row of the next one.
UPGRADES: Mapping[int, Callable[[Row], Row]] = {1: _from_first}


def upgraded(row: Row) -> Row:
    """Return a row of any version as one of this version; the argument stays as it is.

    Raises:
        Newer: the row is of a later version than this code.
        ValueError: the row has no version, or one that no code ever wrote.
    """
    schema = row.get("schema")
    if not isinstance(schema, int):
        raise ValueError("no schema")
    said = f"schema {schema}; this version reads {min(UPGRADES)} to {SCHEMA}"
    if schema > SCHEMA:
        raise Newer(said)
    if schema < min(UPGRADES):
        raise ValueError(said)
    for version in range(schema, SCHEMA):
        row = {**UPGRADES[version](row), "schema": version + 1}
    return row
