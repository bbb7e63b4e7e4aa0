"""Versions of the layout of a row. Files are never rewritten: a row of an older version is upgraded when it is read.

| schema | change |
| --- | --- |
| 1 | the first |
| 2 | `extra.answers`: a digest of the answers that the numbers are of; no `facts.signals`, which changes no number |
| 3 | `variant` as conf/method names it, `official` also of methods with one reading that follow released code; \
`extra.label` names the variant of a method with several and repeats nothing that it sets |
| 4 | `settings.benchmark.files` are digests of bytes; earlier ones left comments out, and become null: unknown |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from espalier.methods.readings import readings_of

Row = dict[str, Any]


class Newer(ValueError):
    """A file was written by a later version of this code, so it is intact but cannot be read."""


#: The version that this code writes; a reader refuses a newer one.
SCHEMA = 4


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


def _from_second(row: Row) -> Row:
    """Return a row of version 2 as one of version 3: its variant and label in the words of conf/method."""
    extra, stated = _table(row.get("extra")), _table(_table(row.get("settings")).get("method"))
    former, words, names = row.get("variant"), extra.get("label"), str(row.get("method")).split("+")
    readings = readings_of(names[0])
    if readings is None or not isinstance(former, str) or not isinstance(words, str):
        return row
    if not readings.variants:
        return {**row, "variant": readings.default}
    params = _first_params(_table(stated.get("params")), composed=len(names) > 1)
    equal = (name for name, sets in readings.variants.items() if {**params, **sets} == params)
    variant = next(equal, former)
    sets = readings.variants.get(variant, {})
    changed = {key: params[key] for key in sets if params.get(key, sets[key]) != sets[key]}
    return {
        **row,
        "variant": variant,
        "extra": {**extra, "label": _relabelled(words, former, variant, sets, changed)},
    }


def _from_third(row: Row) -> Row:
    """Return a row of version 3 as one of version 4: the digests of its task's files are unknown."""
    settings = _table(row.get("settings"))
    if not isinstance(settings.get("benchmark"), Mapping):
        return row
    benchmark = {**settings["benchmark"], "files": None}
    return {**row, "settings": {**settings, "benchmark": benchmark}}


def _first_params(params: Mapping[str, Any], *, composed: bool) -> Mapping[str, Any]:
    """Return the hyper-parameters of a method; of a composition those of its first part, which come first."""
    return _table(next(iter(params.values()), None)) if composed else params


def _relabelled(
    words: str, former: str, variant: str, sets: Mapping[str, Any], changed: Mapping[str, Any]
) -> str:
    """Return a label without what a variant sets, and with what is off that; its last word is the variant."""
    for key in sets:
        words = re.sub(rf"(?<![^\s(]){key}=[^\s()]+", "", words)
    words = re.sub(r"\s+(?=\))|(?<=\()\s+", "", words)
    kept = re.sub(r"\w+\(\)", "", words).removesuffix(former).split()
    return " ".join([*kept, *(f"{key}={value}" for key, value in changed.items()), variant])


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


#: By version: the upgrade to the next version.
UPGRADES: Mapping[int, Callable[[Row], Row]] = {
    1: _from_first,
    2: _from_second,
    3: _from_third,
}


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
