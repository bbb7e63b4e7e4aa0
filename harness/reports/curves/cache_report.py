"""Tables and a figure of cache compressors.

`python -m espalier.harness.reports.curves.cache_report --store results --write lab/measured/kv`
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd

from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_figure import draw_curves
from espalier.harness.reports.curves.curve_points import FULL, percent, share
from espalier.harness.reports.curves.curve_table import Columns, cell_table, gains_over, grid_table
from espalier.harness.reports.curves.report_page import CurvesPage, Report, config_names
from espalier.harness.reports.curves.stored_rows import (
    newest_per_cell,
    read_results,
    read_run_scores,
    results_of,
    tidy,
)
from espalier.harness.reports.frame import StoredResult
from espalier.harness.settings import PLUS
from espalier.harness.specs.comparable import amount
from espalier.harness.stats import mean_interval
from espalier.harness.store.row_text import is_marked, mark

#: The compressor of the window and budget ablation.
COMPARED = "aircache"


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
    results = results_of(
        results,
        lambda result: _place(result) in places and not result.row["extra"].get("speculative"),
        "a cache compressor",
        store,
        "kv",
        model,
        where,
    )
    paths = {key: f"extra.params.{key}" for key in ("allocation", "window")}
    paths |= {"evicted": "extra.cache.ratio", "entries": "tokens.kv_entries"}
    frame = tidy(newest_per_cell(results), headline="extra.headline", **paths)
    frame["place"] = [_place(result) for result in frame.result]
    evicts = frame.result.map(lambda result: "cache" in result.row["extra"])
    # The first of two on a prompt may be two reducers, with a plus between them too.
    methods = frame.method.str.rpartition(PLUS)
    paired = evicts & (methods[1] == PLUS)
    frame["first"] = methods[0].where(paired, frame.method)
    frame["second"] = methods[2].where(paired, "")
    frame["alone"] = evicts & (frame.second == "")
    frame["evicted"] = [float(ratio or 0.0) for ratio in frame.evicted]
    return frame


def compared(frame: pd.DataFrame, files: Collection[str]) -> pd.DataFrame:
    """Return the results of configured compressors and of the unpruned model, on benchmarks with a random baseline.

    Args:
        frame: all results.
        files: names of the curves that have a config file.
    """
    floors = set(frame.place[frame.method == "random_kv"])
    is_compared = (frame.method == FULL) | (frame.alone & frame.curve.isin([*files]))
    return frame[frame.place.isin(floors) & is_compared]


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
        stacks = members[members.second != ""].sort_values(
            "first", key=lambda first: first != FULL, kind="stable"
        )
        compressors = set(zip(stacks.second, stacks.evicted, strict=True))
        reducers = set(zip(stacks["first"], stacks.ratio, strict=True))
        is_shown = (members.second == "") & (members.method != FULL)
        single = members[is_shown & ~members.method.isin(stacks.second[stacks["first"] == FULL])]
        used = [
            (row.curve, row.ratio) in compressors
            if row.alone
            else (row.method, row.ratio) in reducers
            for row in single.itertuples()
        ]
        parts = single[used].sort_values("alone", kind="stable")
        unpruned = members[members.method == FULL][:1]
        cells = pd.concat([unpruned, parts, stacks])
        for name, column in (("entries_share", "entries"), ("bytes_share", "kv_bytes")):
            full = unpruned[column].iloc[0] if len(unpruned) else None
            values = [full and value / full for value in cells[column]]
            cells[name] = pd.Series(values, cells.index, dtype=object)
        by_benchmark[place[1]] = cells
    return by_benchmark


def _place(result: StoredResult) -> tuple[str, str, int]:
    return result.row["model"], result.row["benchmark"], result.row["n_samples"]


def _score(result: StoredResult) -> str:
    """Return the score of a result with its interval in percent."""
    scores = [*read_run_scores(result).scores.values()]
    return mean_interval(scores).percent + mark(is_marked(result.row))


def _evicts_only(result: StoredResult) -> bool:
    """Return whether a run evicts cache entries and drops no tokens."""
    extra = result.row["extra"]
    return bool(extra.get("cache", {}).get("ratio")) and not extra["sites"]


COLUMNS: Columns = {
    "method": lambda cell: cell.curve.replace(f" cache_ratio={cell.evicted:g}", ""),
    # A compressor alone stores its share as the ratio.
    "ratio": lambda cell: "-" if _evicts_only(cell.result) else amount(cell.result.row),
    "cache ratio": lambda cell: f"{cell.evicted:g}",
    "score": lambda cell: _score(cell.result),
    "tokens": lambda cell: percent(cell.kept_tokens / cell.visual_tokens),
    "entries": lambda cell: percent(cell.entries_share),
    "prefill FLOPs": lambda cell: percent(cell.flops_share),
    "prefill ms": lambda cell: "-" if cell.prefill_ms is None else f"{cell.prefill_ms:.1f}",
    "cache": lambda cell: f"{cell.kv_bytes / 1024:.0f} KiB",
    "of the whole": lambda cell: percent(cell.bytes_share),
}


PRESETS = {
    "the curves": "+experiment=kv",
    "the settings of one method": "+experiment=kv_settings",
    "two methods on one prompt": "+experiment=kv_stack",
}


def read_page(store: Path, model: str | None, where: Sequence[str]) -> CurvesPage:
    """Return the page of a store's compressors; Raises as `read_caches`."""
    frame = read_caches(store, model, where)
    names = config_names(set(frame.method))
    settings, stacks, used = ablation(frame), stacked(frame), compared(frame, names)
    keys = set(used.run_key)
    panels = read_panels(store, (), used.model.iloc[0], "kept", keys, where=where) if keys else []
    grids = []
    for (benchmark, ratio), cells in settings.groupby(["benchmark", "ratio"]):
        heads = {rule: rule.replace("_", " ") for rule in sorted(set(cells.allocation))}
        title = f"{benchmark}, {share(ratio)} of the entries, {cells.n_samples.iloc[0]} samples"
        grids.append((title, grid_table(cells, "window", "allocation", heads, COLUMNS["score"])))
    values = {
        "compared": COMPARED,
        "gains": [
            gains_over(
                panel,
                "random_kv",
                names,
                # Best at the largest ratio first.
                lambda points: -float(points.score.iloc[-1].value),
                "with the whole cache",
            )
            for panel in panels
        ],
        "grids": grids,
        "stacks": [
            (
                benchmark,
                f"{cells.headline.iloc[0]} in percent on {cells.n_samples.iloc[0]} samples.",
                cell_table(cells, COLUMNS),
            )
            for benchmark, cells in stacks.items()
        ],
    }
    figures = {"curves": draw_curves(panels, "visual cache entries", names)} if panels else {}
    parts = dict(zip(PRESETS, (panels, settings, stacks), strict=True))
    return CurvesPage(values, figures, parts, marked=frame.unread.any())


REPORT = Report(
    "cache_report",
    "Cache compression",
    "cache",
    {"curves": "Score by the share of visual cache entries kept."},
    "caches.md",
    __doc__,
    read_page,
    PRESETS,
)
main = REPORT.main

if __name__ == "__main__":
    sys.exit(main())
