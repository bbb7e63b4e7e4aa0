"""Read the results of a store for reports: with settings, filtered, and the newest of each cell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.evaluation.samples import Key, SampleScores, read_scorings
from espalier.harness.specs.commands import RUN
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

#: Help text of the `--where` option of the report commands.
WHERE = "only rows with this setting, key=value as in a row's `settings`; may be repeated"

#: Blocks of settings in which null means that the setting does not apply to the method.
UNCONCERNED = ("engine", "draft")


@dataclass(frozen=True)
class StoredResult:
    """A finished run: its folder, its row, and its journal `entries` if the rows came from a table."""

    path: Path
    row: Row
    entries: Sequence[Mapping[str, Any]] | None = None

    def scorings(self) -> dict[Key, SampleScores]:
        """Return the scores of each sample."""
        return read_scorings(
            RunDir(self.path).journal.entries() if self.entries is None else self.entries
        )


ResultT = TypeVar("ResultT", bound=StoredResult)


def read_results(store: Path) -> list[StoredResult]:
    """Return all results of a store, oldest first; results that cannot be read are reported and skipped.

    `store` can also be a folder of tables (harness/store/parquet_tables.py).
    """
    if is_table(store):
        return [
            StoredResult(store / row["run_key"], row, entries)
            for row, entries in read_tables(store)
        ]
    finished = sorted(Store(store).finished(), key=lambda pair: pair[0].committed)
    return [StoredResult(run.path, row) for run, row in finished]


def no_runs_error(store: Path, subject: str, preset: str) -> UserError:
    """Return the error for a store without finished runs of `subject`, naming the preset that produces them."""
    return UserError(
        f"store={str(store)!r} holds no finished runs of {subject}; valid: a store of `{RUN} "
        f"+experiment={preset}`"
    )


def select_model(results: Sequence[ResultT], model: str | None) -> list[ResultT]:
    """Return the results of `model`, or all results if `model` is None and they are of one model.

    Raises:
        UserError: `model` is None and there are several models, or no result is of `model`.
    """
    models = sorted({result.row["model"] for result in results})
    if model is None and len(models) > 1:
        raise UserError(f"the store holds several models; valid for --model: {', '.join(models)}")
    if model is not None and model not in models:
        raise unknown_name("--model", model, models)
    return [result for result in results if model is None or result.row["model"] == model]


def with_settings(results: Sequence[ResultT]) -> tuple[list[ResultT], list[str]]:
    """Return the results that record their settings, and a line that counts the others (of older versions).

    Raises:
        UserError: there are results, but none records its settings.
    """
    kept = [result for result in results if "settings" in result.row]
    if results and not kept:
        raise UserError(
            f"{len(results)} rows on {results[0].row['benchmark']} and other benchmarks have no settings, so they "
            "cannot be compared; valid: rows of this version (the same commands write them)"
        )
    return kept, passed_over(len(results) - len(kept), "without settings, from an older version")


def filter_results(results: Sequence[ResultT], where: Sequence[str]) -> list[ResultT]:
    """Return the results that match all conditions; a setting that does not apply to a method always matches.

    Args:
        results: all with settings.
        where: `key=value` conditions, as error lines print them.

    Raises:
        UserError: a condition is not `key=value`, no result has the setting, or none has the value.
    """
    kept = list(results)
    for condition in where:
        key, _, value = condition.partition("=")
        keys = {name for result in kept for name in settings(result.row)}
        if key not in keys:
            raise unknown_name("--where", key, keys)
        values = {text(settings(result.row).get(key)) for result in kept}
        if not any(value in (value_text, brief(value_text)) for value_text in values):
            raise unknown_name(f"--where {key}", value, map(brief, values))
        kept = [result for result in kept if _agrees(result.row, key, value)]
    return kept


def newest_per_cell(results: Sequence[ResultT], indifferent: Collection[str] = ()) -> list[ResultT]:
    """Return the newest result of each cell, after checking that all can be compared.

    Results of one cell with equal settings differ only in code or package versions, so the newest is used.

    Args:
        results: of one comparison, oldest first, all with settings.
        indifferent: settings that do not affect what the report shows; results may differ in them.

    Raises:
        UserError: results differ in a setting that must be the same (harness/specs/comparable.py).
    """
    check_comparable((result.row for result in results), indifferent)
    return list({identity(result.row): result for result in results}.values())


def _agrees(row: Row, key: str, value: str) -> bool:
    table, block = settings(row), key.partition(".")[0]
    if block in UNCONCERNED and any(
        setting in table and table[setting] is None for setting in (key, block)
    ):
        return True
    value_text = text(table.get(key))
    return value in (value_text, brief(value_text))
