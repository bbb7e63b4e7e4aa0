"""Rows of a store as readers take them: with their folder, only those that tell their settings, one for each cell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.evaluation.samples import Key, SampleScores, read_scorings
from espalier.harness.specs.comparable import (
    Row,
    brief,
    check_comparable,
    identity,
    passed_over,
    settings,
    text,
)
from espalier.harness.store import RunDir, Store
from espalier.harness.store.parquet_tables import is_table, read_tables

#: What `--where` is, for the help of a reader's command line.
WHERE = "only rows with this setting, key=value as in a row's `settings`; may be repeated"

#: Blocks of settings in which null says that a setting does not concern the method.
UNCONCERNED = ("engine", "draft")


@dataclass(frozen=True)
class Stored:
    """A committed row and the folder of its run; `told`, where rows came as a table, is what its journal would say."""

    path: Path
    row: Row
    told: Sequence[Mapping[str, Any]] | None = None

    def scorings(self) -> dict[Key, SampleScores]:
        """Return what scoring said of each sample."""
        return read_scorings(
            RunDir(self.path).journal.entries() if self.told is None else self.told
        )


Some = TypeVar("Some", bound=Stored)


def stored(store: Path) -> list[Stored]:
    """Return all committed rows of a store, the oldest first; those that cannot be read are named and passed over.

    A folder of tables (harness/store/parquet_tables.py) does as well.
    """
    if is_table(store):
        return [Stored(store / row["run_key"], row, told) for row, told in read_tables(store)]
    found = sorted(Store(store).finished(), key=lambda one: one[0].committed)
    return [Stored(run.path, row) for run, row in found]


def no_runs(store: Path, what: str, preset: str) -> UserError:
    """Return the error for a store that has nothing of what a reader shows: what that is, and what writes it."""
    return UserError(
        f"store={str(store)!r} holds no finished runs of {what}; valid: a store of `python run.py "
        f"+experiment={preset}`"
    )


def of_model(rows: Sequence[Some], model: str | None) -> list[Some]:
    """Return the rows of one model: the one asked for, or the only one.

    Raises:
        UserError: rows are of several models and none was asked for, or none is of the one asked for.
    """
    models = sorted({one.row["model"] for one in rows})
    if model is None and len(models) > 1:
        raise UserError(f"the store holds several models; valid for --model: {', '.join(models)}")
    if model is not None and model not in models:
        raise unknown_name("--model", model, models)
    return [one for one in rows if model is None or one.row["model"] == model]


def telling(rows: Sequence[Some]) -> tuple[list[Some], list[str]]:
    """Return the rows that tell their settings, and a line that counts the others: older versions did not write them.

    Raises:
        UserError: there are rows, and none tells.
    """
    found = [one for one in rows if "settings" in one.row]
    if rows and not found:
        raise UserError(
            f"{len(rows)} rows on {rows[0].row['benchmark']} and others do not tell their settings, so that nobody "
            "knows what can be compared; valid: rows of this version (the same commands write them)"
        )
    return found, passed_over(len(rows) - len(found), "without settings, from an older version")


def chosen(rows: Sequence[Some], where: Sequence[str]) -> list[Some]:
    """Return the rows that have the settings asked for, or that these do not concern.

    Args:
        rows: all with settings.
        where: `key=value` each, as error lines print them.

    Raises:
        UserError: a condition is no `key=value`, no row has such a setting, or none has that value.
    """
    found = list(rows)
    for condition in where:
        key, _, value = condition.partition("=")
        known = {name for one in found for name in settings(one.row)}
        if key not in known:
            raise unknown_name("--where", key, known)
        values = {text(settings(one.row).get(key)) for one in found}
        if not any(value in (full, brief(full)) for full in values):
            raise unknown_name(f"--where {key}", value, map(brief, values))
        found = [one for one in found if _agrees(one.row, key, value)]
    return found


def one_of_each(rows: Sequence[Some], indifferent: Collection[str] = ()) -> list[Some]:
    """Return the newest row of each cell, after checking that all can be compared.

    Rows of one cell with equal settings differ in code or in packages, so the newest is the one to read.

    Args:
        rows: of one comparison, the oldest first, all with settings.
        indifferent: settings that make no difference to what the reader shows; rows may differ in them.

    Raises:
        UserError: rows differ in a setting that must be the same (harness/specs/comparable.py).
    """
    check_comparable((one.row for one in rows), indifferent)
    return list({identity(one.row): one for one in rows}.values())


def _agrees(row: Row, key: str, value: str) -> bool:
    table, block = settings(row), key.partition(".")[0]
    if block in UNCONCERNED and any(one in table and table[one] is None for one in (key, block)):
        return True
    full = text(table.get(key))
    return value in (full, brief(full))
