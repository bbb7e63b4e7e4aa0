"""Tables and a figure of denoised answers.

`python -m espalier.harness.reports.curves.diffusion_report --store results --write lab/measured/diffusion`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError, plain_page
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.reports.curves.curve_files import RESOLUTION
from espalier.harness.reports.curves.curve_points import CONTROLS, FLOOR
from espalier.harness.reports.curves.diffusion_rows import (
    CostPoint,
    StepPanel,
    cost_points,
    read_step_panels,
    unpruned_point,
)
from espalier.harness.reports.curves.method_report import config_names, gains
from espalier.harness.reports.curves.metric_names import readable
from espalier.harness.reports.curves.plot_style import COLOURS, GREYS, MARKERS, STYLE
from espalier.harness.reports.curves.random_baselines import BaselineGroup, title
from espalier.harness.reports.curves.stored_rows import WHERE
from espalier.harness.specs.commands import RUN, command
from espalier.harness.store.files.folder_checks import check_folder, existing_store
from espalier.harness.store.unparsed_mark import FOOTNOTE

#: The method shown at every number of steps.
FOLLOWED = "d3tom"

INTRO = """\
# Denoised answers, measured

Written by `python -m espalier.harness.reports.curves.diffusion_report` from the rows of `python run.py
+experiment=diffusion`;
[docs/diffusion.md](../../../docs/diffusion.md) describes the methods. Shares are of visual tokens after a layer: at
the steps behind the first for methods that merge at each step, whose first step runs whole, at every step for the
others.

![Score by time, by FLOPs and by steps](merging.png)

Lines along time and FLOPs go from the whole model to the smallest share at the most steps; of `{followed}` there is one
for each number of steps, and of the whole model one over its numbers of steps. To the right the smallest share alone.
Bars are 95 % intervals.
"""

TABLES = """\
## Methods by share kept

A cell holds the score in percent, the points above random tokens with the paired 95 % bootstrap interval over samples,
and **above** or **below** where the interval leaves 0 out; random tokens, and methods between layers, which have no
random ones beside them, with their own interval. If no method differed from random, one comparison in twenty would be
marked all the same; a `*` says that the paired test still finds a difference when it is corrected for all cells.
"""

BOUGHT = """\
## Merging or fewer steps

Of `{followed}`: score in percent with its 95 % interval, then GFLOP and milliseconds an answer, decoder and head of all
steps. FLOPs leave out what scoring and merging compute; milliseconds are medians over samples in batches, on the
machine that ran it.
"""


def write_diffusion(
    store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
) -> list[Path]:
    """Write `README.md` and a figure (`merging`, .png and .svg) into `folder`, and return their paths.

    Args:
        store: root of the run store.
        folder: created if needed.
        model: required if the store has several.
        where: `key=value` conditions on settings (harness/reports/curves/stored_rows.py).

    Raises:
        UserError: the store has no denoised answers, or of several models and `model` is None, results differ in a
            setting that must be the same, or there is no result of random tokens.
    """
    panels_by_benchmark = read_step_panels(store, model, where)
    all_panels = [panel for step_panels in panels_by_benchmark.values() for panel in step_panels]
    curves = {curve.name for step_panel in all_panels for curve in step_panel.panel.curves}
    names = config_names({curve.split()[0] for curve in curves}, Budget("kept", 0.0))
    folder.mkdir(parents=True, exist_ok=True)
    png, svg, page = folder / "merging.png", folder / "merging.svg", folder / "README.md"
    with rc_context(STYLE):
        figure = draw(panels_by_benchmark, names, FOLLOWED)
        figure.savefig(png, dpi=RESOLUTION)
        # No date, and a fixed salt in the style: equal data gives equal bytes.
        figure.savefig(svg, metadata={"Date": None})
    parts = [INTRO.format(followed=FOLLOWED), BOUGHT.format(followed=FOLLOWED)]
    parts += [
        _cost_table(benchmark, step_panels)
        for benchmark, step_panels in panels_by_benchmark.items()
    ]
    parts.append(TABLES)
    parts += [
        _table(step_panel, names)
        for step_panels in panels_by_benchmark.values()
        for step_panel in step_panels
    ]
    if any(FOOTNOTE in step_panel.panel.notes for step_panel in all_panels):
        parts.append(f"{FOOTNOTE}.\n")
    page.write_text(plain_page("\n".join(parts)), encoding="utf-8")
    return [png, svg, page]


def _table(step_panel: StepPanel, names: dict[str, str]) -> str:
    """Return the scores of one benchmark at one number of steps, random tokens first."""
    panel = step_panel.panel
    floor = next((curve for curve in panel.curves if curve.name == FLOOR), None)
    if floor is None:
        raise UserError(
            f"no rows of method={FLOOR} on {panel.benchmark} in {step_panel.steps} steps to compare; valid: a store "
            f"of `{RUN} +experiment=diffusion`"
        )
    curves = sorted(
        (curve for curve in panel.curves if curve is not floor),
        key=lambda curve: title(curve.name, names),
    )
    full = (
        ""
        if panel.full is None
        else f"; {100 * panel.full.value:.1f}{panel.full_mark} with every token"
    )
    return (
        f"### {panel.benchmark}, {step_panel.steps} steps\n\n{panel.metric} on {panel.n_samples} samples, answers of "
        f"{step_panel.length} places{full}.\n\n{gains(panel, BaselineGroup(floor, tuple(curves)), names)}"
    )


def _cost_table(benchmark: str, step_panels: Sequence[StepPanel]) -> str:
    """Return score and cost of the followed method: a line for each number of steps, a column for each share."""
    ratios = sorted(
        {0.0, *(ratio for step_panel in step_panels for ratio in step_panel.panel.ratios)}
    )
    lines = [
        f"### {benchmark}\n",
        f"| steps | {' | '.join(f'{100 * (1 - ratio):.4g} %' for ratio in ratios)} |",
        "| ---: |" + " ---: |" * len(ratios),
    ]
    for step_panel in step_panels:
        start = unpruned_point(step_panel)
        cells = {} if start is None else {0.0: _cost(start)}
        if any(curve.name == FOLLOWED for curve in step_panel.panel.curves):
            cells |= {
                point.ratio: _cost(point)
                for point in cost_points(step_panel, FOLLOWED)
                if point.ratio
            }
        lines.append(
            f"| {step_panel.steps} | {' | '.join(cells.get(ratio, '-') for ratio in ratios)} |"
        )
    return "\n".join(lines) + "\n"


def _cost(point: CostPoint) -> str:
    return f"{point.point.score.percent}{point.point.mark}; {point.cost.flops / 1e9:.2f}; {point.cost.ms:.0f}"


#: Sizes in inches: one plot, and the legend below all plots.
PLOT, LEGEND = (3.5, 2.9), 0.75

#: Dashes of the method shown at every number of steps, most steps first.
DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.5)))
FULL_LABEL = "every token"


def draw(
    panels: Mapping[str, Sequence[StepPanel]], names: Mapping[str, str], followed: str
) -> Figure:
    """Return the figure, a row for each benchmark: by time and by FLOPs over ratios, and by steps at the largest ratio.

    Curves over ratios are shown at the most steps; the curve `followed` at every number of steps; the unpruned model
    over its numbers of steps. Draw and save inside `matplotlib.rc_context(STYLE)`.
    """
    looks = _looks(panels, names)
    size = (PLOT[0] * 3, PLOT[1] * len(panels) + LEGEND)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    grid = figure.subplots(len(panels), 3, squeeze=False, sharey="row")
    for row, (benchmark, step_panels) in zip(grid, panels.items(), strict=True):
        _along_ratios(row[0], step_panels, looks, followed, lambda point: point.cost.ms)
        _along_ratios(row[1], step_panels, looks, followed, lambda point: point.cost.flops / 1e9)
        ratio = step_panels[0].panel.ratios[-1]
        _along_steps(row[2], step_panels, looks, ratio)
        panel = step_panels[0].panel
        row[0].set_ylabel(f"{readable(panel.metric)} (%)")
        row[0].set_title(
            f"{benchmark}, {panel.n_samples} samples",
            loc="left",
            fontsize=10,
            fontweight="bold",
            pad=16,
        )
        row[2].set_title(f"{100 * ratio:.4g} % of the tokens removed", loc="right", fontsize=9)
        row[0].set_xlabel("milliseconds an answer")
        row[1].set_xlabel("GFLOP an answer, decoder and head")
        row[2].set_xlabel(f"denoising steps (log scale), {step_panels[0].length} places")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8.5,
        handlelength=3.4,
    )
    return figure


def _looks(
    panels: Mapping[str, Sequence[StepPanel]], names: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Give each curve its own colour and marker; controls are grey and hollow."""
    curves = {
        curve.name
        for step_panels in panels.values()
        for step_panel in step_panels
        for curve in step_panel.panel.curves
    }
    order = sorted(curves, key=lambda name: (name.split()[0] in CONTROLS, title(name, names)))
    looks: dict[str, dict[str, Any]] = {}
    for index, curve in enumerate(order):
        control = curve.split()[0] in CONTROLS
        palette = GREYS if control else COLOURS
        colour = palette[index % len(palette)]
        looks[curve] = {
            "label": title(curve, names),
            "color": colour,
            "marker": MARKERS[(index + 1) % len(MARKERS)],
            "markerfacecolor": "white" if control else colour,
            "markersize": 4.8,
            "linewidth": 1.3,
        }
    return looks


def _names(step_panel: StepPanel) -> set[str]:
    return {curve.name for curve in step_panel.panel.curves}


def _along_ratios(
    axes: Axes, step_panels: Sequence[StepPanel], looks: Mapping[str, Any], followed: str, cost: Any
) -> None:
    """Draw every curve at the most steps, the followed one also at fewer, and the unpruned model over steps."""
    full, *fewer = step_panels
    start = unpruned_point(full)
    for curve, look in looks.items():
        if curve in _names(full):
            line = [*([] if start is None else [start]), *cost_points(full, curve)]
            # The first point is the unpruned model's, which is drawn with another marker.
            _draw_line(axes, line, cost, {**look, "markevery": slice(int(start is not None), None)})
    for dash, fewer_panel in zip(DASHES[1:], fewer, strict=False):
        if followed in _names(fewer_panel):
            fewer_start = unpruned_point(fewer_panel)
            line = [
                *([] if fewer_start is None else [fewer_start]),
                *cost_points(fewer_panel, followed),
            ]
            look = {
                **looks[followed],
                "label": f"{looks[followed]['label']}, {fewer_panel.steps} steps",
            }
            look["markevery"] = slice(int(fewer_start is not None), None)
            _draw_line(axes, line, cost, {**look, "linestyle": dash})
    _draw_unpruned(axes, step_panels, cost)
    _tidy(axes)
    axes.set_xlim(left=0, right=1.08 * axes.get_xlim()[1])


def _along_steps(
    axes: Axes, step_panels: Sequence[StepPanel], looks: Mapping[str, Any], ratio: float
) -> None:
    """Draw every curve at one ratio over numbers of steps, with intervals."""
    for number, (curve, look) in enumerate(looks.items()):
        line = [
            point
            for step_panel in step_panels
            if curve in _names(step_panel)
            for point in cost_points(step_panel, curve)
            if point.ratio == ratio
        ]
        # Shift neighbours by a few percent, so that their bars do not overlap.
        shift = 1.0 + 0.03 * (number - (len(looks) - 1) / 2)
        _draw_line(axes, line, lambda point, shift=shift: point.steps * shift, look, bars=True)
    _draw_unpruned(axes, step_panels, lambda point: point.steps, numbered=False)
    _tidy(axes)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([step_panel.steps for step_panel in step_panels]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))


def _draw_unpruned(
    axes: Axes, step_panels: Sequence[StepPanel], cost: Any, numbered: bool = True
) -> None:
    """Draw the unpruned model over its numbers of steps, with intervals."""
    line = [point for point in map(unpruned_point, step_panels) if point is not None]
    look = {"label": FULL_LABEL, "color": "#000000", "marker": MARKERS[0], "markersize": 6.5}
    _draw_line(axes, line, cost, {**look, "linewidth": 2.0, "zorder": 4}, bars=True)
    for point in line if numbered else ():
        axes.annotate(
            f"{point.steps} steps",
            (cost(point), 100 * point.point.score.value),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
        )


def _draw_line(
    axes: Axes, line: Sequence[CostPoint], cost: Any, look: Any, bars: bool = False
) -> None:
    x, y = [cost(point) for point in line], [100 * point.point.score.value for point in line]
    axes.plot(x, y, markeredgewidth=0.9, **look)
    if bars:
        low = [100 * point.point.score.low for point in line]
        high = [100 * point.point.score.high for point in line]
        axes.vlines(x, low, high, color=look["color"], linewidth=0.7, zorder=1)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write tables and a figure of a store's denoised answers; exit code 2 and one line if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m espalier.harness.reports.curves.diffusion_report", description=__doc__
    )
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
    parser.add_argument("--write", type=Path, required=True, help="folder of tables and picture")
    parser.add_argument("--model", help="which model, if the store has several")
    parser.add_argument("--where", action="append", default=[], help=WHERE)
    options = parser.parse_args(argv)
    try:
        check_folder("--write", options.write)
        paths = write_diffusion(
            existing_store(options.store), options.write, options.model, options.where
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
