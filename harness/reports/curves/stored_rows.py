"""Read the results of a store for reports: with settings, filtered, the newest of each cell, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.reports.frame import ROWS, StoredResult, at, report_damaged, stored_results
from espalier.harness.settings import choice
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
from espalier.harness.specs.comparable import name as name_of
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.index import BLOCKS, EXTRA

#: Help text of the `--where` option of the report commands.
WHERE = "only rows with this setting, key=value as in a row's `settings`; may be repeated"

#: Blocks of settings in which null means that the setting does not apply to the method.
UNCONCERNED = ("engine", "draft")


#: Blocks of a row that reports show or compare.
REPORTED = (*(name for name in BLOCKS if EXTRA not in name), EXTRA)


def read_results(store: Path) -> list[StoredResult]:
    """Return all results of a store, oldest first; results that cannot be read are reported and skipped.

    `store` can also be a folder of tables (harness/store/exports.py).
    """
    results = stored_results(store, REPORTED, report_damaged)
    return sorted(results, key=lambda result: result.committed)


def results_of(
    results: Sequence[StoredResult],
    shows: Callable[[StoredResult], object],
    subject: str,
    store: Path,
    preset: str,
    model: str | None = None,
    where: Sequence[str] = (),
) -> list[StoredResult]:
    """Return the results that a report shows: of one model, with settings, matching all conditions.

    Args:
        results: of a store, oldest first.
        shows: whether the report shows a result.
        subject: content of the report, for the error line.
        store: where they come from.
        preset: the sweep that produces such results.
        model: required if there are several.
        where: `key=value` conditions on settings.

    Raises:
        UserError: there are no such results, or as `select_model`, `with_settings` and `filter_results`.
    """
    selected = [result for result in results if shows(result)]
    if not selected:
        raise UserError(
            f"store={str(store)!r} holds no finished runs of {subject}; valid: a store of `{RUN} "
            f"+experiment={preset}`"
        )
    return filter_results(with_settings(select_model(selected, model))[0], where)


def select_model(results: Sequence[StoredResult], model: str | None) -> list[StoredResult]:
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


def with_settings(results: Sequence[StoredResult]) -> tuple[list[StoredResult], list[str]]:
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


def filter_results(results: Sequence[StoredResult], where: Sequence[str]) -> list[StoredResult]:
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
        choice("--where", key, keys)
        values = {text(settings(result.row).get(key)) for result in kept}
        if not any(value in (value_text, brief(value_text)) for value_text in values):
            raise unknown_name(f"--where {key}", value, map(brief, values))
        kept = [result for result in kept if _agrees(result.row, key, value)]
    return kept


def newest_per_cell(
    results: Sequence[StoredResult], indifferent: Collection[str] = ()
) -> list[StoredResult]:
    """Return the newest result of each cell, after checking that all can be compared.

    Results of one cell with equal settings differ only in code or package versions, so the newest is used.

    Args:
        results: of one comparison, oldest first, all with settings.
        indifferent: settings that do not affect the report; results may differ in them.

    Raises:
        UserError: results differ in a setting that must be the same (harness/specs/comparable.py).
    """
    check_comparable((result.row for result in results), indifferent)
    return list({identity(result.row): result for result in results}.values())


@dataclass(frozen=True)
class RunScores:
    """The per-sample scores of one run's headline metric.

    Attributes:
        name: of its curve: the method, its non-default parameters, and the engine's `policy` if it differs.
        layer: decoder layer before which tokens are first removed, 0 for any site before the decoder; None without a
            site, or if cache entries are evicted as well.
        evicts: whether only cache entries are removed and no tokens.
        units: the unit of statistics of each sample: task and first document.
    """

    name: str
    result: StoredResult
    layer: int | None
    evicts: bool
    scores: Mapping[Key, float]
    units: Mapping[Key, Key]

    @property
    def row(self) -> Row:
        """The row of the run."""
        return self.result.row


def read_run_scores(result: StoredResult) -> RunScores:
    """Return the per-sample scores of a result.

    Raises:
        UserError: some samples have no score.
    """
    row, extra = result.row, result.row["extra"]
    metric = extra["headline"]
    scorings = {
        key: scoring for key, scoring in result.scorings().items() if metric in scoring.scores
    }
    # Missing in rows of older versions: how the metric is aggregated, and over how many samples.
    aggregation = extra.get("aggregation", {}).get(metric, {})
    expected = aggregation.get("samples") or row["n_samples"]
    if len(scorings) != expected:
        reason = aggregation.get("note")
        raise UserError(
            f"run {row['run_key']} ({row['benchmark']}) has {metric} for {len(scorings)} of {expected} samples; "
            + (f"{metric}: {reason}" if reason else "run it again with force=true")
        )
    site = next(iter(extra.get("sites") or []), None)
    # The tower, the projector and the prefix all come before layer 0. A run that also evicts cache entries is not
    # comparable with random tokens alone.
    layer = int(site["layer"]) if site and site["where"] == "layer" else 0
    return RunScores(
        name=name_of(row),
        result=result,
        layer=layer if site and "cache" not in extra else None,
        evicts="cache" in extra and not site,
        scores={key: scoring.scores[metric] for key, scoring in scorings.items()},
        units={
            key: (key[0], scoring.units.get(metric, key[1])) for key, scoring in scorings.items()
        },
    )


def tidy(results: Sequence[StoredResult], **paths: str) -> pd.DataFrame:
    """Return a line for each result: `ROWS` but for a metric's columns, the values at `paths`, and `result` itself.

    Missing values are None and numbers keep their type, so that cells print as rows do. The index is the run's folder.
    """
    columns = {name: column.read for name, column in ROWS.items() if column.read is not None}
    columns |= {name: at(path) for name, path in paths.items()}
    lines = [
        {**{name: read(result.row) for name, read in columns.items()}, "result": result}
        for result in results
    ]
    index = [result.path for result in results]
    return pd.DataFrame(lines, columns=[*columns, "result"], index=index, dtype=object)


def _agrees(row: Row, key: str, value: str) -> bool:
    table, block = settings(row), key.partition(".")[0]
    if block in UNCONCERNED and any(
        setting in table and table[setting] is None for setting in (key, block)
    ):
        return True
    value_text = text(table.get(key))
    return value in (value_text, brief(value_text))
