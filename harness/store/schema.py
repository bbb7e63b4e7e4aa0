"""Versions of the layout of a row. Files are never rewritten: a row of an older version is upgraded when it is read.

| schema | change |
| --- | --- |
| 1 | the first |
| 2 | `extra.answers`: a digest of the answers that the numbers are of; no `facts.signals`, which changes no number |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]


class Newer(ValueError):
    """A file was written by a later version of this code, so it is intact but cannot be read."""


#: The version that this code writes; a reader refuses a newer one.
SCHEMA = 2


def _from_first(row: Row) -> Row:
    """Return a row of version 1 as one of version 2: the digest of its answers is unknown."""
    second = {**row, "extra": {"answers": None, **_table(row.get("extra"))}}
    if isinstance(row.get("settings"), Mapping):
        second["settings"] = {
            name: _without_signals(value) if name in ("model", "draft") else value
            for name, value in row["settings"].items()
        }
    return second


def _without_signals(side: Any) -> Any:
    facts = _table(_table(side).get("facts"))
    kept_facts = {name: value for name, value in facts.items() if name != "signals"}
    return {**side, "facts": kept_facts} if facts else side


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


#: By version: the upgrade to the next version.
UPGRADES: Mapping[int, Callable[[Row], Row]] = {1: _from_first}


def upgraded(row: Row) -> Row:
    """Return a row of any version as one of this version; the argument is not changed.

    Raises:
        Newer: the row is of a later version than this code.
        ValueError: the row has no version, or one that no code ever wrote.
    """
    schema = row.get("schema")
    if not isinstance(schema, int):
        raise ValueError("no schema")
    problem = f"schema {schema}; this version reads {min(UPGRADES)} to {SCHEMA}"
    if schema > SCHEMA:
        raise Newer(problem)
    if schema < min(UPGRADES):
        raise ValueError(problem)
    for version in range(schema, SCHEMA):
        row = {**UPGRADES[version](row), "schema": version + 1}
    return row
