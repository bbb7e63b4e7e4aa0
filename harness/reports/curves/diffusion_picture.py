"""The figure of denoised answers: score by time, by FLOPs and by steps, for merging and for fewer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from espalier.harness.reports.curves.curve_points import CONTROLS
from espalier.harness.reports.curves.diffusion_rows import (
    CostPoint,
    StepPanel,
    cost_points,
    unpruned_point,
)
from espalier.harness.reports.curves.plot_style import COLOURS, GREYS, MARKERS, readable
from espalier.harness.reports.curves.random_baselines import title

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
