"""Which rows fill one cell of a table, and which may be compared: the one rule for every reader of rows.

A row names its cell by its keys and lists under `settings` what else changed its numbers (docs/rows.md). Rows of
one cell must agree in all of it, rows along a curve in all but what comes with the ratio or costs time alone, rows of
one comparison in the model and the benchmark.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from espalier.harness.errors import UserError
from espalier.harness.specs.row_settings import COSTS
from espalier.harness.specs.run_spec import EngineSpec
from espalier.harness.store.files.digests import digest
from espalier.harness.store.row_text import amount_text

Row = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry")

#: Keys of a row that name its cell; `keep` does so too where it was set, and `extra.label`: hyper-parameters off their
#: default, and which of two variants it is.
CELL = (
    *("model", "benchmark", "method", "variant"),
    *("ratio", "budget_rule", "seed", "n_samples"),
)

#: Along a curve ratios and counts of tokens vary, and seeds are averaged.
ALONG = ("ratio", "keep", "seed")

#: Blocks in which the rows of one comparison may differ: a curve is named after method and engine policy.
OF_A_METHOD = ("method.", "draft.", "engine.", "artifacts")

#: Settings of earlier versions that change no number: rows with and without them are comparable.
BYGONE = frozenset({"model.facts.signals", "draft.facts.signals"})

#: Digests of a task's files; null in a row of an earlier version: unknown, and comparable with any.
FILES = "benchmark.files"

#: The engine's defaults.
USUAL = EngineSpec()

#: A hyper-parameter in a row's label; those of the parts of a composition are in brackets.
_PARAMETER = re.compile(r"(?<![\w(])(\w+)=")

#: Letters of a value in an error line, and differences in it.
SHOWN, NAMED = 24, 4


def identity(row: Row, without: Collection[str] = ()) -> tuple[Hashable, ...]:
    """Return what names the cell that a row fills."""
    return (
        *(row[key] for key in CELL if key not in without),
        None if "keep" in without else row.get("keep"),
        row["extra"].get("label") or "",
    )


def settings(row: Row) -> dict[str, Any]:
    """Return the settings of a row by dotted key, without `BYGONE` ones; lists are values."""
    return {key: value for key, value in _flat(row["settings"], "") if key not in BYGONE}


def settings_digest(block: Mapping[str, Any]) -> str:
    """Return one digest of a row's settings without `FILES`: rows of one cell that share it differ in code alone."""
    return digest([(key, value) for key, value in sorted(_flat(block, "")) if key != FILES])


def policy(row: Row) -> str:
    """Return the engine's settings that are off their default and may change answers, for the name of a curve.

    `positions=renumbered` for example; empty where all are as usual, or where the row does not state it.
    """
    engine = row.get("settings", {}).get("engine", {})
    unusual = {
        name: value
        for name, value in engine.items()
        if value is not None
        and value != getattr(USUAL, name, None)
        and f"engine.{name}" not in COSTS
    }
    return " ".join(f"{name}={text(unusual[name])}" for name in sorted(unusual))


def name(row: Row) -> str:
    """Return the name of a row's curve: method, what differs from its defaults, variant, the engine's policy."""
    parts = (row["method"], row["extra"].get("label"), policy(row))
    return " ".join(part for part in parts if part)


def sweep_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of the rows' curves, with each hyper-parameter in which the curves of a method differ.

    `fastv`, `fastv K=1` and `fastv K=3` become `fastv K=2`, `fastv K=1` and `fastv K=3`. A default of null is left out.
    """
    labels = [(row["method"], row.get("variant"), row["extra"].get("label") or "") for row in rows]
    swept: dict[Hashable, dict[str, None]] = {}
    for method, variant, label in labels:
        swept.setdefault((method, variant), {}).update(dict.fromkeys(_PARAMETER.findall(label)))
    names = []
    for row, (method, variant, label) in zip(rows, labels, strict=True):
        params, present = row["extra"].get("params") or {}, _PARAMETER.findall(label)
        defaults = [
            f"{key}={params[key]}"
            for key in swept[method, variant]
            if key not in present and params.get(key) is not None
        ]
        names.append(" ".join(filter(None, (method, *defaults, label, policy(row)))))
    return names


def amount(row: Row) -> str:
    """Return the share that a row removes, as text: the ratio, or the count of tokens that was set instead."""
    return amount_text(row["ratio"], row.get("keep"))


def differences(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the settings in which rows differ, each with its values as text in the order of the rows."""
    tables = [settings(row) for row in rows]
    keys = sorted({key for table in tables for key in table})
    values_by_key = {key: [text(table.get(key)) for table in tables] for key in keys}
    return {
        key: values
        for key, values in values_by_key.items()
        if len(set(values) - ({"null"} if key == FILES else set())) > 1
    }


def check_comparable(rows: Iterable[Row], indifferent: Collection[str] = ()) -> None:
    """Raise UserError if rows differ in a setting that must be equal within one comparison.

    Args:
        rows: of any models and benchmarks, all with settings.
        indifferent: settings that do not affect the reader's output.
    """
    rows, free = list(rows), frozenset(indifferent)
    for group in grouped((identity(row), row) for row in rows).values():
        _check(group, lambda key: key not in free)
    for group in grouped((identity(row, ALONG), row) for row in rows).values():
        # Hyper-parameters outside the label depend on the ratio: a schedule that was fitted to it.
        _check(group, lambda key: key not in free | COSTS and not key.startswith("method.params."))
    for group in grouped(((row["model"], row["benchmark"]), row) for row in rows).values():
        _check(group, lambda key: not key.startswith(OF_A_METHOD))


def text(value: Any) -> str:
    """Return a setting's value for an error line or a condition."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def brief(value: str) -> str:
    """Return a value's text for an error line; of a long one its beginning and a digest."""
    if len(value) <= SHOWN:
        return value
    return f"{value[:8]}..{hashlib.sha256(value.encode()).hexdigest()[:8]}"


def grouped(pairs: Iterable[tuple[Key, Entry]]) -> dict[Key, list[Entry]]:
    """Return the entries of each key; keys and entries stay in their order."""
    groups: dict[Key, list[Entry]] = {}
    for key, entry in pairs:
        groups.setdefault(key, []).append(entry)
    return groups


def _check(rows: Sequence[Row], counts: Callable[[str], bool]) -> None:
    first, *rest_rows = rows
    # Rows of an indexed store share their settings, so that each is compared once.
    compared = {id(first["settings"])}
    for second in rest_rows:
        if id(second["settings"]) in compared or first["settings"] == second["settings"]:
            continue
        compared.add(id(second["settings"]))
        differing = {
            key: values for key, values in differences([first, second]).items() if counts(key)
        }
        if differing:
            raise UserError(_line(first, second, differing))


def _line(row: Row, second: Row, differing: Mapping[str, Sequence[str]]) -> str:
    curves = dict.fromkeys(f"{name(each)} at {amount(each)}" for each in (row, second))
    settings_text = [
        f"{key} ({', '.join(map(brief, values))})"
        for key, values in list(differing.items())[:NAMED]
    ]
    remainder = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
    key, values = next(iter(differing.items()))
    choice = f"--where '{key}={brief(values[0])}' of python -m espalier curves[.decoders]"
    return (
        f"rows of {row['model']} on {row['benchmark']} cannot be mixed: {' and '.join(curves)} differ in "
        f"{', '.join(settings_text)}{remainder}; "
        f"valid: one value, with {choice}, or a store for each"
    )


def _flat(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def passed_over(number: int, kind: str) -> list[str]:
    """Return a line with the number and the kind of the rows left out; none for none."""
    return [f"{number} row{'s' if number > 1 else ''} passed over: {kind}"] if number else []
