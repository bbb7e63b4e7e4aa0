"""The curves figure: one panel for each benchmark, score against the share of visual tokens removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from espalier.harness.reports.curves.curve_points import Curve, CurvePanel
from espalier.harness.reports.curves.metric_names import readable
from espalier.harness.reports.curves.plot_style import GRID, NOTE, line_look, looks
from espalier.harness.store.unparsed_mark import FOOTNOTE, MARK, MEANS

COLUMNS = 3

#: Sizes in inches: the plot, the space above and below it, one line and one letter of a label.
PLOT, AROUND, LINE, LETTER = (2.55, 2.05), 0.95, 0.16, 0.066

FULL = "unpruned"

Looks = Mapping[str, dict[str, Any]]


def draw(panels: Sequence[CurvePanel], of: str = "visual tokens") -> Figure:
    """Return the figure; a method keeps its colour, dashes and marker in all panels.

    The legend fills the free space of the last row. Draw and save inside `matplotlib.rc_context(STYLE)`.

    Args:
        panels: one for each benchmark.
        of: what the methods remove, for the axis label.
    """
    looks_by_name = looks((curve.name, curve.control) for panel in panels for curve in panel.curves)
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    # Labels are next to the plot, which keeps its size whatever their number and length.
    tall = max(PLOT[1], LINE * (max(len(panel.curves) for panel in panels) + 2))
    wide = PLOT[0] + 0.75 + LETTER * max(map(len, (*looks_by_name, FULL)))
    spare = rows * columns > len(panels)
    legend_height = (
        0.0 if spare else 0.3 + LINE * math.ceil((len(looks_by_name) + 2) / (2 * columns))
    )
    size = (wide * columns, (tall + AROUND) * rows + legend_height)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.08))
    grid = figure.subplots(rows, columns, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index < len(panels):
            _draw_panel(axes, panels[index], looks_by_name, LINE / tall)
            label = "removed (%), log scale of what is left"
            if _counts(panels[index]):
                label = "kept, log scale"
            axes.set_xlabel(f"{of} {label}", fontsize=8)
        else:
            axes.set_axis_off()
    _legend(figure, grid.flat[len(panels)] if spare else None, panels, looks_by_name, columns)
    return figure


def _legend(
    figure: Figure,
    axes: Axes | None,
    panels: Sequence[CurvePanel],
    looks_by_name: Looks,
    columns: int,
) -> None:
    """Draw the legend in the free panel, or below all panels."""
    handles: list[Line2D | Patch] = [
        Line2D([], [], label=name, **line_look(look)) for name, look in looks_by_name.items()
    ]
    if any(panel.full is not None for panel in panels):
        handles.append(Line2D([], [], color="#000000", linewidth=1.2, dashes=(5, 3), label=FULL))
    handles.append(Patch(color="#000000", alpha=0.1, label="its 95 % interval"))
    if any(FOOTNOTE in panel.notes for panel in panels):
        shape = {"marker": f"${MARK}$", "linestyle": "", "color": "#000000"}
        handles.append(Line2D([], [], label=MEANS, **shape))  # type: ignore[arg-type]
    options = {"frameon": False, "fontsize": 8.5, "handlelength": 3.2}
    if axes is None:
        figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns, **options)
        return
    title = "Grey and hollow: controls. Bars: 95 % intervals."
    columns = 1 if len(handles) < 10 else 2
    legend = axes.legend(handles=handles, loc="upper left", ncols=columns, title=title, **options)
    legend.set_alignment("left")
    legend.get_title().set_fontsize(8.5)


def _removed(ratio: float) -> float:
    """Return the x position of a ratio: the token reduction factor; equal steps remove equal shares of the rest."""
    return 1 / (1 - ratio)


def _counts(panel: CurvePanel) -> list[int]:
    """Return the tokens that stay at each ratio of a panel; empty where a ratio was set."""
    counts = [panel.keep(ratio) for ratio in panel.ratios]
    return [] if None in counts else [count for count in counts if count is not None]


def _draw_panel(axes: Axes, panel: CurvePanel, looks_by_name: Looks, gap: float) -> None:
    # A panel with only the unpruned model has no ratios.
    places = [_removed(ratio) for ratio in panel.ratios] or [_removed(0)]
    axes.set_xscale("log")
    for number, curve in enumerate(panel.curves):
        # Shift neighbours by a percent on the log axis, so that their bars do not overlap.
        shift = 1.0 + 0.012 * (number - (len(panel.curves) - 1) / 2)
        _draw_curve(axes, curve, looks_by_name[curve.name], shift, bare=panel.full is not None)
    axes.set_xlim(min(places) / 1.1, max(places) * 1.1)
    axes.margins(y=0.06)
    if panel.full is not None:
        _draw_full(axes, panel)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    counts = _counts(panel)
    axes.xaxis.set_major_formatter(
        FixedFormatter([str(count) for count in counts])
        if counts
        else FuncFormatter(lambda x, _: f"{100 * (1 - 1 / x):.4g}")
    )
    axes.set_ylabel("score (%)")
    axes.set_title(panel.benchmark, loc="left", fontsize=10.5, fontweight="bold", pad=19)
    note = f"{readable(panel.metric)}, {panel.n_samples} samples"
    axes.text(0, 1.04, note, transform=axes.transAxes, fontsize=8.5, color=NOTE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)
    _label(axes, panel, looks_by_name, gap)


def _draw_curve(axes: Axes, curve: Curve, look: dict[str, Any], shift: float, bare: bool) -> None:
    """Draw one line with error bars; with `bare`, ratio 0 has no bar because the unpruned band is there."""
    no_bars = [bare and point.ratio == 0 for point in curve.points]
    x = [
        _removed(point.ratio) * (1 if no_bar else shift)
        for point, no_bar in zip(curve.points, no_bars, strict=True)
    ]
    y = [100 * point.score.value for point in curve.points]
    lower = [
        0.0 if no_bar else 100 * (point.score.value - point.score.low)
        for point, no_bar in zip(curve.points, no_bars, strict=True)
    ]
    upper = [
        0.0 if no_bar else 100 * (point.score.high - point.score.value)
        for point, no_bar in zip(curve.points, no_bars, strict=True)
    ]
    axes.errorbar(
        x,
        y,
        yerr=(lower, upper),
        elinewidth=0.8,
        capsize=0,
        zorder=2 if look["control"] else 3,
        **line_look(look),
    )
    for place, value, point in zip(x, y, curve.points, strict=True):
        if point.unread:
            axes.annotate(MARK, (place, value), (3, 3), textcoords="offset points", fontsize=9)


def _draw_full(axes: Axes, panel: CurvePanel) -> None:
    assert panel.full is not None  # checked by the caller
    full = panel.full
    axes.axhspan(100 * full.low, 100 * full.high, color="#000000", alpha=0.06, linewidth=0)
    axes.axhline(100 * full.value, color="#000000", linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)


def _label(axes: Axes, panel: CurvePanel, looks_by_name: Looks, gap: float) -> None:
    """Write each name at the end of its line, spread apart where names would collide."""
    low, high = axes.get_ylim()
    ends: list[tuple[float, str, object]] = []
    if panel.full is not None:
        ends.append((100 * panel.full.value, FULL + panel.full_mark, "#000000"))
    for curve in panel.curves:
        last = curve.points[-1]
        # The lightest grey is too light for letters.
        colour = NOTE if curve.control else looks_by_name[curve.name]["color"]
        ends.append((100 * last.score.value, curve.name, colour))
    ends.sort(key=lambda end: end[0])
    places = spread([(value - low) / (high - low) for value, _, _ in ends], gap)
    # Labels stay within the height of the plot: not below its axis, not in its title.
    count = len(places)
    places = [
        max(min(place, 0.985 - gap * (count - 1 - number)), gap * number)
        for number, place in enumerate(places)
    ]
    for place, (value, name, colour) in zip(places, ends, strict=True):
        axes.annotate(
            name,
            xy=(1.0, (value - low) / (high - low)),
            xytext=(1.045, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            },
            annotation_clip=False,
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Return positions near the ascending `wanted` positions, in the same order, at least `gap` apart.

    Groups of colliding labels are merged and centred on the mean of their wanted positions.
    """
    groups: list[tuple[float, int]] = []
    for value in wanted:
        centre, size = value, 1
        while groups and centre - gap * (size - 1) / 2 < _top(groups[-1], gap) + gap:
            group_centre, count = groups.pop()
            centre = (group_centre * count + centre * size) / (count + size)
            size += count
        groups.append((centre, size))
    return [
        centre + gap * (position - (size - 1) / 2)
        for centre, size in groups
        for position in range(size)
    ]


def _top(group: tuple[float, int], gap: float) -> float:
    centre, size = group
    return centre + gap * (size - 1) / 2
