"""The picture of denoised answers: score by time, by FLOPs and by steps, for merging and for taking fewer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from espalier.harness.reports.curves.curve_points import CONTROLS
from espalier.harness.reports.curves.diffusion_rows import Dealt, Spot, spots, whole
from espalier.harness.reports.curves.plot_style import COLOURS, GREYS, MARKERS, readable
from espalier.harness.reports.curves.random_baselines import title

#: In inches: one plot, and what stands below them all.
PLOT, LEGEND = (3.5, 2.9), 0.75

#: How lines of the method that is shown at every number of steps are drawn, the most steps first.
DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.5)))
WHOLE = "every token"


def draw(panels: Mapping[str, Sequence[Dealt]], names: Mapping[str, str], followed: str) -> Figure:
    """Return the figure: a row for each benchmark; by time and by FLOPs, along ratios; by steps, at the largest ratio.

    Lines along ratios are those of the most steps, of the whole model along steps, and of the curve `followed` of every
    number of steps. Drawing and saving both belong inside `matplotlib.rc_context(STYLE)`.
    """
    looks = _looks(panels, names)
    size = (PLOT[0] * 3, PLOT[1] * len(panels) + LEGEND)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    grid = figure.subplots(len(panels), 3, squeeze=False, sharey="row")
    for row, (benchmark, dealt) in zip(grid, panels.items(), strict=True):
        _along_ratios(row[0], dealt, looks, followed, lambda spot: spot.spent.ms)
        _along_ratios(row[1], dealt, looks, followed, lambda spot: spot.spent.flops / 1e9)
        ratio = dealt[0].panel.ratios[-1]
        _along_steps(row[2], dealt, looks, ratio)
        panel = dealt[0].panel
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
        row[2].set_xlabel(f"denoising steps (log scale), {dealt[0].length} places")
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
    panels: Mapping[str, Sequence[Dealt]], names: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Give each curve a colour and a marker of its own, controls a grey and a hollow one."""
    curves = {one.name for dealt in panels.values() for each in dealt for one in each.panel.curves}
    order = sorted(curves, key=lambda name: (name.split()[0] in CONTROLS, title(name, names)))
    looks: dict[str, dict[str, Any]] = {}
    for place, curve in enumerate(order):
        control = curve.split()[0] in CONTROLS
        palette = GREYS if control else COLOURS
        colour = palette[place % len(palette)]
        looks[curve] = {
            "label": title(curve, names),
            "color": colour,
            "marker": MARKERS[(place + 1) % len(MARKERS)],
            "markerfacecolor": "white" if control else colour,
            "markersize": 4.8,
            "linewidth": 1.3,
        }
    return looks


def _along_ratios(
    axes: Axes, dealt: Sequence[Dealt], looks: Mapping[str, Any], followed: str, cost: Any
) -> None:
    """Draw every curve at the most steps, the followed one at fewer too, and the whole model over its steps."""
    full, *fewer = dealt
    start = whole(full)
    for curve, look in looks.items():
        if any(one.name == curve for one in full.panel.curves):
            line = [*([] if start is None else [start]), *spots(full, curve)]
            # The first point is the whole model's, which has a marker of its own.
            _line(axes, line, cost, {**look, "markevery": slice(int(start is not None), None)})
    for dash, some in zip(DASHES[1:], fewer, strict=False):
        if any(one.name == followed for one in some.panel.curves):
            begun = whole(some)
            line = [*([] if begun is None else [begun]), *spots(some, followed)]
            look = {**looks[followed], "label": f"{looks[followed]['label']}, {some.steps} steps"}
            look["markevery"] = slice(int(begun is not None), None)
            _line(axes, line, cost, {**look, "linestyle": dash})
    _whole(axes, dealt, cost)
    _tidy(axes)
    axes.set_xlim(left=0, right=1.08 * axes.get_xlim()[1])


def _along_steps(
    axes: Axes, dealt: Sequence[Dealt], looks: Mapping[str, Any], ratio: float
) -> None:
    """Draw every curve at one ratio over numbers of steps, with intervals."""
    for number, (curve, look) in enumerate(looks.items()):
        line = [
            spot
            for one in dealt
            if any(each.name == curve for each in one.panel.curves)
            for spot in spots(one, curve)
            if spot.ratio == ratio
        ]
        # Neighbours are moved apart by a few percent, or their bars would overlap.
        shift = 1.0 + 0.03 * (number - (len(looks) - 1) / 2)
        _line(axes, line, lambda spot, shift=shift: spot.steps * shift, look, bars=True)
    _whole(axes, dealt, lambda spot: spot.steps, numbered=False)
    _tidy(axes)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([one.steps for one in dealt]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))


def _whole(axes: Axes, dealt: Sequence[Dealt], cost: Any, numbered: bool = True) -> None:
    """Draw the whole model over its numbers of steps, with its intervals."""
    line = [spot for spot in map(whole, dealt) if spot is not None]
    look = {"label": WHOLE, "color": "#000000", "marker": MARKERS[0], "markersize": 6.5}
    _line(axes, line, cost, {**look, "linewidth": 2.0, "zorder": 4}, bars=True)
    for spot in line if numbered else ():
        axes.annotate(
            f"{spot.steps} steps",
            (cost(spot), 100 * spot.point.score.value),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
        )


def _line(axes: Axes, line: Sequence[Spot], cost: Any, look: Any, bars: bool = False) -> None:
    x, y = [cost(spot) for spot in line], [100 * spot.point.score.value for spot in line]
    axes.plot(x, y, markeredgewidth=0.9, **look)
    if bars:
        below = [100 * spot.point.score.low for spot in line]
        above = [100 * spot.point.score.high for spot in line]
        axes.vlines(x, below, above, color=look["color"], linewidth=0.7, zorder=1)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)
