"""Tables and a figure of cache compressors.

`python -m espalier.harness.reports.curves.cache_report --store results --write lab/measured/kv`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib import rc_context

from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError, plain_page
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.reports.curves.cache_rows import (
    COMPARED,
    CacheResult,
    ablation_results,
    compared_results,
    read_cache_results,
    stacked_results,
)
from espalier.harness.reports.curves.figures import draw
from espalier.harness.reports.curves.curve_files import RESOLUTION
from espalier.harness.reports.curves.curve_points import FULL, CurvePanel, read_panels
from espalier.harness.reports.curves.method_report import config_names, gains
from espalier.harness.reports.curves.plot_style import STYLE
from espalier.harness.reports.curves.random_baselines import BaselineGroup, title_of
from espalier.harness.reports.curves.stored_rows import WHERE
from espalier.harness.specs.commands import RUN, command
from espalier.harness.specs.comparable import amount, name
from espalier.harness.store.files.folder_checks import check_folder, existing_store
from espalier.harness.store.unparsed_mark import FOOTNOTE, is_marked

#: The sweep that produces the results of a part.
PRESETS = {
    "the curves": "+experiment=kv",
    "the settings of one method": "+experiment=kv_settings",
    "two methods on one prompt": "+experiment=kv_stack",
}

INTRO = """\
# Cache compressors, measured

Written by `python -m espalier.harness.reports.curves.cache_report`;
[docs/kv.md](../../../docs/kv.md) describes the methods.
Shares are of visual cache entries, on average over layers.
"""

CURVES = """\
A cell holds the score in percent, the points above random entries with the paired 95 % interval over
samples, and **above** or **below** where the interval leaves 0 out; names are those of the files in `conf/method`. The
first token of an answer comes out of the whole prefill, so that no method can lose it. If no method differed from
random, one comparison in twenty would be marked all the same; a `*` says that the paired test still finds a difference
when it is corrected for all cells of the table.

The picture has the readings that bear their methods' names.

![Score by share of visual cache entries kept](curves.png)
"""

SETTINGS = """\
Score in percent with its 95 % interval: one line for each window, a column for each way of splitting the budget over
layers.
"""

STACKED = """\
A method that drops tokens, a compressor, and both on one prompt. Tokens are those left behind the prefill, entries the
visual ones that all layers hold together, both of what the whole model has. Prefill FLOPs are of the text stack.
Milliseconds are medians over batches, on the machine that ran it; bytes are those of a sample's cache, words and answer
included.
"""


def write_cache(
    store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
) -> tuple[list[Path], list[str]]:
    """Write `README.md` and a figure (`curves`, .png and .svg) into `folder`.

    Args:
        store: root of the run store.
        folder: created if needed.
        model: required if the store has several.
        where: `key=value` conditions on settings (harness/reports/curves/stored_rows.py).

    Returns:
        The paths written, and a line for each part that is missing.

    Raises:
        UserError: the store has no results of a compressor, or of several models and `model` is None, or results differ
            in a setting that must be the same.
    """
    cells = read_cache_results(store, model, where)
    names = config_names({cell.row["method"] for cell in cells}, Budget("kept", 0.0))
    files, settings, pairs = (
        compared_results(cells, names),
        ablation_results(cells),
        stacked_results(cells),
    )
    parts, written, missing = [INTRO], [], []
    folder.mkdir(parents=True, exist_ok=True)
    if files:
        panels = read_panels(store, (), files[0].row["model"], "kept", _keys(files), where=where)
        written += _picture(panels, names, folder / "curves")
        parts += ["## By share of the cache\n", CURVES]
        parts += [f"### {panel.benchmark}\n\n{_table(panel, names)}" for panel in panels]
    if settings:
        parts += [f"## {COMPARED}: windows and budgets\n", SETTINGS, *_grids(settings)]
    if pairs:
        parts += ["## Two methods on one prompt\n", STACKED, *stacking(pairs)]
    for (subject, preset), results in zip(PRESETS.items(), (files, settings, pairs), strict=True):
        if not results:
            missing.append(f"no rows for {subject}; run: {RUN} {preset}")
    if missing:
        parts.append("## Left out\n\n" + "\n".join(f"- {line}" for line in missing) + "\n")
    if any(is_marked(cell.row) for cell in cells):
        parts.append(f"{FOOTNOTE}.\n")
    page = folder / "README.md"
    page.write_text(plain_page("\n".join(parts)), encoding="utf-8")
    return [*written, page], missing


def _keys(cells: Sequence[CacheResult]) -> set[str]:
    return {cell.row["run_key"] for cell in cells}


def _table(panel: CurvePanel, names: dict[str, str]) -> str:
    """Return the table of one benchmark, random entries first."""
    (floor,) = [curve for curve in panel.curves if curve.name == "random_kv"]
    curves = [curve for curve in panel.curves if curve is not floor]
    full = (
        ""
        if panel.full is None
        else f"; {100 * panel.full.value:.1f}{panel.full_mark} with the whole cache"
    )
    ranked = sorted(curves, key=lambda curve: -curve.points[-1].score.value)
    table = gains(panel, BaselineGroup(floor, tuple(ranked)), names)
    return f"{panel.metric} on {panel.n_samples} samples{full}.\n\n{table}"


def _grids(cells: Sequence[CacheResult]) -> list[str]:
    """Return one table for each benchmark and ratio."""
    tables = []
    for benchmark, ratio in sorted({(cell.row["benchmark"], cell.row["ratio"]) for cell in cells}):
        group = [
            cell
            for cell in cells
            if (cell.row["benchmark"], cell.row["ratio"]) == (benchmark, ratio)
        ]
        rules = sorted({cell.params["allocation"] for cell in group})
        lines = [
            f"### {benchmark}, {100 * (1 - ratio):.4g} % of the entries, {group[0].row['n_samples']} samples\n",
            f"| window | {' | '.join(rule.replace('_', ' ') for rule in rules)} |",
            "| --- |" + " ---: |" * len(rules),
        ]
        for window in sorted({cell.params["window"] for cell in group}):
            by_rule = {
                cell.params["allocation"]: cell.percent
                for cell in group
                if cell.params["window"] == window
            }
            lines.append(f"| {window} | {' | '.join(by_rule.get(rule, '-') for rule in rules)} |")
        tables.append("\n".join(lines) + "\n")
    return tables


def _picture(panels: Sequence[CurvePanel], names: dict[str, str], path: Path) -> list[Path]:
    """Draw the curves that carry their methods' plain names; the variants are close to them, and are in the tables."""
    named = [
        replace(
            panel,
            curves=tuple(
                replace(curve, name=title_of(curve, names))
                for curve in panel.curves
                if title_of(curve, names) == curve.name.split()[0]
            ),
        )
        for panel in panels
    ]
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    with rc_context(STYLE):
        figure = draw(named, of="visual cache entries")
        figure.savefig(png, dpi=RESOLUTION)
        # No date, and a fixed salt in the style: equal data gives equal bytes.
        figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


HEAD = (
    *("method", "ratio", "cache ratio", "score", "tokens", "entries"),
    *("prefill FLOPs", "prefill ms", "cache", "of the whole"),
)


def stacking(by_benchmark: Mapping[str, Sequence[CacheResult]]) -> Iterator[str]:
    """Yield one table for each benchmark; shares refer to the unpruned model's row, which is first if it exists."""
    for benchmark, cells in by_benchmark.items():
        metric = cells[0].row["extra"]["headline"]
        yield "\n".join(
            [
                f"### {benchmark}\n",
                f"{metric} in percent on {cells[0].row['n_samples']} samples.\n",
                f"| {' | '.join(HEAD)} |",
                "| --- |" + " ---: |" * (len(HEAD) - 1),
                *(f"| {' | '.join(_line(cell, cells))} |" for cell in cells),
                "",
            ]
        )


def _line(cell: CacheResult, cells: Sequence[CacheResult]) -> tuple[str, ...]:
    row = cell.row
    tokens, memory, time = row["tokens"], row["memory"], row["time"]
    unpruned = next((result.row for result in cells if result.row["method"] == FULL), None)
    entries = tokens["kv_entries"]
    # A compressor alone stores its share as the ratio.
    evicts_only = cell.evicted > 0 and not row["extra"]["sites"]
    return (
        name(row).replace(f" cache_ratio={cell.evicted:g}", ""),
        "-" if evicts_only else amount(row),
        f"{cell.evicted:g}",
        cell.percent,
        _percent(tokens["kept_final"] / tokens["visual"]),
        "-" if unpruned is None else _percent(entries / unpruned["tokens"]["kv_entries"]),
        _percent(row["flops"]["share_of_full"]),
        "-" if time["prefill_ms"] is None else f"{time['prefill_ms']:.1f}",
        f"{memory['kv_bytes'] / 1024:.0f} KiB",
        "-" if unpruned is None else _percent(memory["kv_bytes"] / unpruned["memory"]["kv_bytes"]),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write tables and a figure of a store's compressors; exit code 2 and one line if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m espalier.harness.reports.curves.cache_report", description=__doc__
    )
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
    parser.add_argument("--write", type=Path, required=True, help="folder of tables and picture")
    parser.add_argument("--model", help="which model, if the store has several")
    parser.add_argument("--where", action="append", default=[], help=WHERE)
    options = parser.parse_args(argv)
    try:
        check_folder("--write", options.write)
        paths, missing = write_cache(
            existing_store(options.store), options.write, options.model, options.where
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in paths:
        print(path)
    for line in missing:
        print(f"left out: {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
