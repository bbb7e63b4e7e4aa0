"""Tables and a figure of cache compressors.

`python -m espalier.harness.reports.curves.cache_report --store results --write lab/measured/kv`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from espalier.harness.cost.budget import Budget
from espalier.harness.reports.curves.cache_results import (
    COMPARED,
    ablation,
    compared,
    read_caches,
    score_text,
    stacked,
)
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_files import draw_curves
from espalier.harness.reports.curves.curve_points import FULL, BaselineGroup, CurvePanel, share
from espalier.harness.reports.curves.curve_table import gains, markdown_table
from espalier.harness.reports.curves.report_page import (
    Written,
    config_names,
    missing_parts,
    report_command,
    texts,
    write_page,
)
from espalier.harness.specs.comparable import amount
from espalier.harness.store.unparsed_mark import FOOTNOTE, is_marked

#: The sweep that produces the results of a part.
PRESETS = {
    "the curves": "+experiment=kv",
    "the settings of one method": "+experiment=kv_settings",
    "two methods on one prompt": "+experiment=kv_stack",
}

INTRO, CURVES, SETTINGS, STACKED = texts("caches")

HEADS = (
    *("method", "ratio", "cache ratio", "score", "tokens", "entries"),
    *("prefill FLOPs", "prefill ms", "cache", "of the whole"),
)


def write_cache(
    store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
) -> Written:
    """Write `README.md` and a figure (`curves`) of a store's results of compressors; Raises as `read_caches`."""
    frame = read_caches(store, model, where)
    names = config_names(set(frame.method), Budget("kept", 0.0))
    files, settings, pairs = compared(frame, names), ablation(frame), stacked(frame)
    parts, figures = [INTRO], {}
    if len(files):
        keys = set(files.run_key)
        panels = read_panels(store, (), files.model.iloc[0], "kept", keys, where=where)
        figures["curves"] = draw_curves(
            [_named(panel, names) for panel in panels], "visual cache entries"
        )
        parts += ["## By share of the cache\n", CURVES]
        parts += [f"### {panel.benchmark}\n\n{_gains(panel, names)}" for panel in panels]
    if len(settings):
        parts += [f"## {COMPARED}: windows and budgets\n", SETTINGS, *_grids(settings)]
    if pairs:
        parts += ["## Two methods on one prompt\n", STACKED]
        parts += [_stack(benchmark, cells) for benchmark, cells in pairs.items()]
    missing = missing_parts(PRESETS, (len(files), len(settings), pairs))
    marked = [f"{FOOTNOTE}.\n"] if any(is_marked(result.row) for result in frame.result) else []
    return write_page(folder, parts, figures, missing, marked)


def _gains(panel: CurvePanel, names: dict[str, str]) -> str:
    """Return the table of one benchmark, random entries first."""
    curves = sorted(
        panel.curves,
        key=lambda curve: (curve.name != "random_kv", -curve.points[-1].score.value),
    )
    table = gains(panel, BaselineGroup(curves[0], tuple(curves[1:])), names)
    full = panel.full_text("with the whole cache")
    return f"{panel.metric} on {panel.n_samples} samples{full}.\n\n{table}"


def _named(panel: CurvePanel, names: dict[str, str]) -> CurvePanel:
    """Return the curves that bear their methods' plain names; variants are close to them, and are in the tables."""
    titles = [(curve, curve.title(names)) for curve in panel.curves]
    plain = [
        replace(curve, name=title) for curve, title in titles if title == curve.name.split()[0]
    ]
    return replace(panel, curves=tuple(plain))


def _grids(frame: pd.DataFrame) -> Iterator[str]:
    """Yield one table for each benchmark and ratio: a line for each window, a column for each allocation."""
    for (benchmark, ratio), group in frame.groupby(["benchmark", "ratio"]):
        rules = sorted(set(group.allocation))
        lines = []
        for window in sorted(set(group.window)):
            row = group[group.window == window].set_index("allocation").result
            cells = [score_text(row[rule]) if rule in row.index else "-" for rule in rules]
            lines.append([window, *cells])
        heading = (
            f"### {benchmark}, {share(ratio)} of the entries, {group.n_samples.iloc[0]} samples"
        )
        heads = ["window", *(rule.replace("_", " ") for rule in rules)]
        yield f"{heading}\n\n{markdown_table(heads, lines)}"


def _stack(benchmark: str, cells: pd.DataFrame) -> str:
    """Return one benchmark's table; shares refer to the unpruned model's row, which is first if it exists."""
    row = cells.result.iloc[0].row
    full = next(cells[cells.method == FULL].itertuples(), None)
    table = markdown_table(HEADS, [_cells(cell, full) for cell in cells.itertuples()])
    heading = f"{row['extra']['headline']} in percent on {row['n_samples']} samples."
    return f"### {benchmark}\n\n{heading}\n\n{table}"


def _cells(cell: Any, full: Any) -> tuple[str, ...]:
    row = cell.result.row
    # A compressor alone stores its share as the ratio.
    evicts_only = cell.evicted > 0 and not row["extra"]["sites"]
    return (
        cell.curve.replace(f" cache_ratio={cell.evicted:g}", ""),
        "-" if evicts_only else amount(row),
        f"{cell.evicted:g}",
        score_text(cell.result),
        _percent(cell.kept_tokens / cell.visual_tokens),
        "-" if full is None else _percent(cell.entries / full.entries),
        _percent(cell.flops_share),
        "-" if cell.prefill_ms is None else f"{cell.prefill_ms:.1f}",
        f"{cell.kv_bytes / 1024:.0f} KiB",
        "-" if full is None else _percent(cell.kv_bytes / full.kv_bytes),
    )


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


main = report_command("cache_report", __doc__, write_cache)

if __name__ == "__main__":
    sys.exit(main())
