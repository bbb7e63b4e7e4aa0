"""Tables and a figure of cache compressors.

`python -m espalier.harness.reports.curves.cache_report --store results --write lab/measured/kv`
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from espalier.harness.cost.budget import Budget
from espalier.harness.reports.curves import cache_results as results
from espalier.harness.reports.curves.curve_files import draw_curves
from espalier.harness.reports.curves.curve_points import percent, share
from espalier.harness.reports.curves.curve_table import Columns, cell_table, gains_over, grid_table
from espalier.harness.reports.curves.report_page import Page, Part, Report, config_names, texts
from espalier.harness.specs.comparable import amount

INTRO, CURVES, SETTINGS, STACKED = texts("caches", compared=results.COMPARED)

COLUMNS: Columns = {
    "method": lambda cell: cell.curve.replace(f" cache_ratio={cell.evicted:g}", ""),
    # A compressor alone stores its share as the ratio.
    "ratio": lambda cell: "-" if results.evicts_only(cell.result) else amount(cell.result.row),
    "cache ratio": lambda cell: f"{cell.evicted:g}",
    "score": lambda cell: results.score_text(cell.result),
    "tokens": lambda cell: percent(cell.kept_tokens / cell.visual_tokens),
    "entries": lambda cell: percent(cell.entries_share),
    "prefill FLOPs": lambda cell: percent(cell.flops_share),
    "prefill ms": lambda cell: "-" if cell.prefill_ms is None else f"{cell.prefill_ms:.1f}",
    "cache": lambda cell: f"{cell.kv_bytes / 1024:.0f} KiB",
    "of the whole": lambda cell: percent(cell.bytes_share),
}


def read_page(store: Path, model: str | None, where: Sequence[str]) -> Page:
    """Return the page of a store's compressors; Raises as `read_caches`."""
    frame = results.read_caches(store, model, where)
    names = config_names(set(frame.method), Budget("kept", 0.0))
    settings, stacked = results.ablation(frame), results.stacked(frame)
    panels = results.panels(store, results.compared(frame, names), where)
    figures = {"curves": lambda shown: draw_curves(shown, "visual cache entries", names)}
    full = "with the whole cache"
    gains = [gains_over(panel, "random_kv", names, results.rank, full) for panel in panels]
    parts = [
        Part(panels, CURVES, gains, figures, "the curves"),
        Part(settings, SETTINGS, _grids(settings), subject="the settings of one method"),
        Part(stacked, STACKED, _stacks(stacked), subject="two methods on one prompt"),
    ]
    return Page(INTRO, parts, is_marked=frame.unread.any())


def _grids(frame: pd.DataFrame) -> Iterable[str]:
    for (benchmark, ratio), cells in frame.groupby(["benchmark", "ratio"]):
        heads = {rule: rule.replace("_", " ") for rule in sorted(set(cells.allocation))}
        yield f"### {benchmark}, {share(ratio)} of the entries, {cells.n_samples.iloc[0]} samples\n"
        yield grid_table(cells, "window", "allocation", heads, COLUMNS["score"])


def _stacks(by_benchmark: Mapping[str, pd.DataFrame]) -> Iterable[str]:
    for benchmark, cells in by_benchmark.items():
        n_samples, metric = cells.n_samples.iloc[0], cells.headline.iloc[0]
        yield f"### {benchmark}\n\n{metric} in percent on {n_samples} samples.\n"
        yield cell_table(cells, COLUMNS)


PRESETS = {
    "the curves": "+experiment=kv",
    "the settings of one method": "+experiment=kv_settings",
    "two methods on one prompt": "+experiment=kv_stack",
}
REPORT = Report("cache_report", __doc__, read_page, PRESETS)
main = REPORT.main

if __name__ == "__main__":
    sys.exit(main())
