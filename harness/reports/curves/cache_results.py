"""Select the results of cache compressors to compare: compressors, settings of one of them, two methods at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd

from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_points import FULL, Curve, CurvePanel
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
    newest_per_cell,
    read_results,
    read_run_scores,
    results_of,
    tidy,
)
from espalier.harness.stats import mean_interval
from espalier.harness.store.row_text import is_marked, mark

#: The compressor of the window and budget ablation.
COMPARED = "aircache"
#: Separator between the names of two methods on one prompt.
PLUS = "+"


def read_caches(store: Path, model: str | None = None, where: Sequence[str] = ()) -> pd.DataFrame:
    """Return the newest result of each cell that evicts cache entries, of each reducer, and of the unpruned model.

    Columns that `tidy` lacks: `place`, which results to compare share; `first` and `second`, the methods on a
    prompt; `alone`, whether a compressor runs alone; `evicted`, the share of entries to evict.

    Args:
        store: root of the run store.
        model: required if the store has several.
        where: `key=value` conditions on settings.

    Raises:
        UserError: no result evicts entries, there are several models and `model` is None, or results differ in a
            setting that must be the same.
    """
    results = [result for result in read_results(store) if result.row["budget_rule"] == "kept"]
    places = {_place(result) for result in results if "cache" in result.row["extra"]}

    def is_related(result: StoredResult) -> bool:
        return _place(result) in places and not result.row["extra"].get("speculative")

    results = results_of(results, is_related, "a cache compressor", store, "kv", model, where)
    paths = {key: f"extra.params.{key}" for key in ("allocation", "window")}
    paths |= {"evicted": "extra.cache.ratio", "entries": "tokens.kv_entries"}
    frame = tidy(newest_per_cell(results), headline="extra.headline", **paths)
    frame["place"] = [_place(result) for result in frame.result]
    methods = frame.method.str.partition(PLUS)
    frame["first"], frame["second"] = methods[0], methods[2]
    evicts = frame.result.map(lambda result: "cache" in result.row["extra"])
    frame["alone"] = evicts & (frame.second == "")
    frame["evicted"] = [float(ratio or 0.0) for ratio in frame.evicted]
    return frame


def score_text(result: StoredResult) -> str:
    """Return the score of a result with its interval in percent."""
    scores = list(read_run_scores(result).scores.values())
    return mean_interval(scores).percent + mark(is_marked(result.row))


def compared(frame: pd.DataFrame, files: Collection[str]) -> pd.DataFrame:
    """Return the results of configured compressors and of the unpruned model, on benchmarks with a random baseline.

    Args:
        frame: all results.
        files: names of the curves that have a config file.
    """
    floors = set(frame.place[frame.method == "random_kv"])
    is_compared = (frame.method == FULL) | (frame.alone & frame.curve.isin([*files]))
    return frame[frame.place.isin(floors) & is_compared]


def panels(store: Path, files: pd.DataFrame, where: Sequence[str]) -> list[CurvePanel]:
    """Return the panels of the results that `compared` returned; none without any."""
    if files.empty:
        return []
    model = files.model.iloc[0]
    return read_panels(store, (), model, "kept", set(files.run_key), where=where)


def rank(curve: Curve) -> float:
    """Return the sort key of a curve: best at the largest ratio first."""
    return -curve.points[-1].score.value


def evicts_only(result: StoredResult) -> bool:
    """Return whether a run evicts cache entries and drops no tokens."""
    extra = result.row["extra"]
    return bool(extra.get("cache", {}).get("ratio")) and not extra["sites"]


def ablation(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the ablation: all windows and budgets of a (benchmark, ratio) that has several."""
    candidates = frame[(frame.method == COMPARED) & frame.alone]
    pairs = pd.Series([*zip(candidates.place, candidates.ratio, strict=True)], candidates.index)
    chosen = candidates[pairs.isin(set(pairs[candidates.label.map(bool)]))]
    return chosen.sort_values("window", kind="stable")


def stacked(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return for each benchmark with two methods on one prompt: the unpruned model, the methods alone, both.

    A compressor combined with `none` is the compressor alone, from the same sweep. Columns `entries_share` and
    `bytes_share` refer to the unpruned model; None without it.
    """
    by_benchmark = {}
    for place in sorted(set(frame.place[frame.second != ""])):
        members = frame[frame.place == place]
        stacks = members[members.second != ""]
        stacks = stacks.sort_values("first", key=lambda first: first != FULL, kind="stable")
        compressors = set(zip(stacks.second, stacks.evicted, strict=True))
        reducers = set(zip(stacks["first"], stacks.ratio, strict=True))
        single = members[
            (members.second == "")
            & (members.method != FULL)
            & ~members.method.isin(stacks.second[stacks["first"] == FULL])
        ]
        used = [
            (row.curve, row.ratio) in compressors
            if row.alone
            else (row.method, row.ratio) in reducers
            for row in single.itertuples()
        ]
        parts = single[used].sort_values("alone", kind="stable")
        unpruned = members[members.method == FULL][:1]
        cells = pd.concat([unpruned, parts, stacks])
        for share, column in (("entries_share", "entries"), ("bytes_share", "kv_bytes")):
            full = unpruned[column].iloc[0] if len(unpruned) else None
            values = [full and value / full for value in cells[column]]
            cells[share] = pd.Series(values, cells.index, dtype=object)
        by_benchmark[place[1]] = cells
    return by_benchmark


def _place(result: StoredResult) -> tuple[str, str, int]:
    return result.row["model"], result.row["benchmark"], result.row["n_samples"]
