"""Select the results of cache compressors to compare: compressors, settings of one of them, two methods at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.harness.reports.curves.curve_points import FULL
from espalier.harness.reports.curves.run_scores import read_run_scores
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
    filter_results,
    newest_per_cell,
    no_runs_error,
    read_results,
    select_model,
    with_settings,
)
from espalier.harness.specs.comparable import name
from espalier.harness.stats import Interval, mean_interval
from espalier.harness.store.unparsed_mark import is_marked, mark

#: The compressor of the window and budget ablation.
COMPARED = "aircache"
#: Separator between the names of two methods on one prompt.
PLUS = "+"


@dataclass(frozen=True)
class CacheResult(StoredResult):
    """A result of a compressor, of two methods on one prompt, or of one of these methods alone."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The method's hyper-parameters."""
        params: Mapping[str, Any] = self.row["extra"]["params"]
        return params

    @property
    def evicted(self) -> float:
        """Requested share of cache entries to evict."""
        return float((self.row["extra"].get("cache") or {}).get("ratio", 0.0))

    @cached_property
    def score(self) -> Interval:
        """Mean of the headline over samples."""
        return mean_interval(list(read_run_scores(self).scores.values()))

    @property
    def percent(self) -> str:
        """The score with its interval in percent."""
        return self.score.percent + mark(is_marked(self.row))


def read_cache_results(
    store: Path, model: str | None = None, where: Sequence[str] = ()
) -> list[CacheResult]:
    """Return the newest result of each cell that evicts cache entries, of each reducer, and of the unpruned model.

    Args:
        store: root of the run store.
        model: required if the store has several.
        where: `key=value` conditions on settings (harness/reports/curves/stored_rows.py).

    Raises:
        UserError: no result evicts entries, there are several models and `model` is None, or results differ in a
            setting that must be the same.
    """
    results = [result for result in read_results(store) if result.row["budget_rule"] == "kept"]
    benchmarks = {_comparison_key(result) for result in results if "cache" in result.row["extra"]}
    if not benchmarks:
        raise no_runs_error(store, "a cache compressor", "kv")
    related = [
        result
        for result in results
        if _comparison_key(result) in benchmarks and not result.row["extra"].get("speculative")
    ]
    cells = [
        CacheResult(result.path, result.row, result.entries)
        for result in with_settings(select_model(related, model))[0]
    ]
    return newest_per_cell(filter_results(cells, where))


def compared_results(cells: Sequence[CacheResult], files: Collection[str]) -> list[CacheResult]:
    """Return the results of configured compressors and of the unpruned model, on benchmarks with a random baseline.

    Args:
        cells: results.
        files: names of the curves that have a config file.
    """
    floors = {_comparison_key(cell) for cell in cells if cell.row["method"] == "random_kv"}
    return [
        cell
        for cell in cells
        if _comparison_key(cell) in floors
        and (cell.row["method"] == FULL or (_is_compressor(cell) and name(cell.row) in files))
    ]


def ablation_results(cells: Sequence[CacheResult]) -> list[CacheResult]:
    """Return the results of the ablation: all windows and budgets of a (benchmark, ratio) that has several."""
    candidates = [cell for cell in cells if cell.row["method"] == COMPARED and _is_compressor(cell)]
    varied = {
        (*_comparison_key(cell), cell.row["ratio"])
        for cell in candidates
        if cell.row["extra"].get("label")
    }
    return [cell for cell in candidates if (*_comparison_key(cell), cell.row["ratio"]) in varied]


def stacked_results(cells: Sequence[CacheResult]) -> dict[str, list[CacheResult]]:
    """Return for each benchmark with two methods on one prompt: the unpruned model, the methods alone, both.

    A compressor combined with `none` is the compressor alone, from the same sweep.
    """
    by_benchmark: dict[str, list[CacheResult]] = {}
    for group in sorted({_comparison_key(cell) for cell in cells if PLUS in cell.row["method"]}):
        members = [cell for cell in cells if _comparison_key(cell) == group]
        stacked = [cell for cell in members if PLUS in cell.row["method"]]
        stacked.sort(key=lambda cell: _first(cell) != FULL)
        combined_with_none = {
            cell.row["method"].partition(PLUS)[2] for cell in stacked if _first(cell) == FULL
        }
        parts = [
            cell
            for cell in members
            if PLUS not in cell.row["method"]
            and cell.row["method"] not in combined_with_none
            and any(_is_part(cell, stack) for stack in stacked)
        ]
        unpruned = [cell for cell in members if cell.row["method"] == FULL]
        by_benchmark[group[1]] = [*unpruned[:1], *sorted(parts, key=_is_compressor), *stacked]
    return by_benchmark


def _first(cell: CacheResult) -> str:
    return str(cell.row["method"]).partition(PLUS)[0]


def _is_compressor(cell: CacheResult) -> bool:
    return "cache" in cell.row["extra"] and PLUS not in cell.row["method"]


def _is_part(cell: CacheResult, stack: CacheResult) -> bool:
    """Return whether a result is of one of two stacked methods at the ratio used in the stack."""
    first, _, second = stack.row["method"].partition(PLUS)
    if _is_compressor(cell):
        return bool(name(cell.row) == second and cell.row["ratio"] == stack.evicted)
    return bool(cell.row["method"] == first != FULL and cell.row["ratio"] == stack.row["ratio"])


def _comparison_key(result: StoredResult) -> tuple[str, str, int]:
    return result.row["model"], result.row["benchmark"], result.row["n_samples"]
