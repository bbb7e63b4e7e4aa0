"""The figure: one panel for each benchmark, score against the share of visual tokens kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.report.data import Curve, Panel

#: Okabe and Ito's palette for all kinds of colour vision, without its yellow (too light for lines).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREYS = ("#333333", "#6E6E6E", "#969696")
DASHES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
INK = "#222222"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "curves",
    "svg.fonttype": "none",
}

COLUMNS = 2

#: In inches: the plot itself, what stands above and below it, one line and one letter of a label.
PLOT, AROUND, LINE, LETTER = (3.7, 3.3), 1.0, 0.17, 0.068


def draw(panels: Sequence[Panel], along: str = "visual tokens kept") -> Figure:
    """Return the figure; a method keeps its colour and marker over all panels, `along` says what the shares are of.

    Drawing and saving both belong inside `matplotlib.rc_context(STYLE)`.
    """
    looks = _looks(panels)
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    # Labels stand beside the plot; it keeps its size whatever their number and length.
    tall = max(PLOT[1], LINE * (max(len(panel.curves) for panel in panels) + 2))
    wide = PLOT[0] + 1.0 + LETTER * max(map(len, (*looks, "unpruned")))
    size = (wide * columns, (tall + AROUND) * rows)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.1))
    grid = figure.subplots(rows, columns, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place < len(panels):
            _draw_panel(axes, panels[place], looks, LINE / tall)
            axes.set_xlabel(f"{along} (%)")
        else:
            axes.set_axis_off()
    return figure


def _looks(panels: Sequence[Panel]) -> dict[str, dict[str, object]]:
    """Give methods colours, dashed from the second round of the palette on; controls are grey."""
    looks: dict[str, dict[str, object]] = {}
    curves = {curve.name: curve for panel in panels for curve in panel.curves}
    counts = {True: 0, False: 0}
    for place, curve in enumerate(sorted(curves.values(), key=lambda c: (c.control, c.name))):
        palette = GREYS if curve.control else COLOURS
        turn, index = divmod(counts[curve.control], len(palette))
        counts[curve.control] += 1
        looks[curve.name] = {
            "color": palette[index],
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": DASHES[(turn + curve.control * index) % len(DASHES)],
            "zorder": 2 if curve.control else 3,
        }
    return looks


def _draw_panel(axes: Axes, panel: Panel, looks: dict[str, dict[str, object]], gap: float) -> None:
    kept = [100 * (1 - ratio) for ratio in panel.ratios]
    axes.set_xscale("log")
    for number, curve in enumerate(panel.curves):
        # Neighbours are moved apart by a percent on the log axis, or their bars would overlap.
        shift = 1.0 + 0.012 * (number - (len(panel.curves) - 1) / 2)
        _draw_curve(axes, curve, looks[curve.name], shift, bare=panel.full is not None)
    left, right = max(kept) * 1.08, min(kept) / 1.1
    axes.set_xlim(left, right)
    axes.margins(y=0.06)
    if panel.full is not None:
        _draw_full(axes, panel, left)
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.4g}"))
    axes.set_ylabel(f"{panel.metric} (%)")
    axes.set_title(panel.benchmark, loc="left", fontsize=10.5, fontweight="bold", pad=20)
    note = f"{panel.metric}, {panel.n_samples} samples, 95 % intervals"
    axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=8.5, color="#666666")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)
    _label(axes, panel, looks, gap)


def _draw_curve(
    axes: Axes, curve: Curve, look: dict[str, object], shift: float, bare: bool
) -> None:
    """Draw one line with its bars; `bare` leaves ratio 0 alone, where the unpruned band stands."""
    plain = [bare and point.ratio == 0 for point in curve.points]
    x = [
        100 * (1 - point.ratio) * (1 if bald else shift)
        for point, bald in zip(curve.points, plain, strict=True)
    ]
    y = [100 * point.score.value for point in curve.points]
    below = [
        0.0 if bald else 100 * (point.score.value - point.score.low)
        for point, bald in zip(curve.points, plain, strict=True)
    ]
    above = [
        0.0 if bald else 100 * (point.score.high - point.score.value)
        for point, bald in zip(curve.points, plain, strict=True)
    ]
    axes.errorbar(
        x,
        y,
        yerr=(below, above),
        linewidth=1.6,
        markersize=4.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        elinewidth=0.8,
        capsize=0,
        **look,  # type: ignore[arg-type]
    )


def _draw_full(axes: Axes, panel: Panel, left: float) -> None:
    assert panel.full is not None  # the caller looked
    full = panel.full
    axes.axhspan(100 * full.low, 100 * full.high, color="#000000", alpha=0.06, linewidth=0)
    axes.axhline(100 * full.value, color="#000000", linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)


def _label(axes: Axes, panel: Panel, looks: dict[str, dict[str, object]], gap: float) -> None:
    """Write each name beside the end of its line, moved apart where they would collide."""
    low, high = axes.get_ylim()
    ends: list[tuple[float, str, object]] = []
    if panel.full is not None:
        ends.append((100 * panel.full.value, "unpruned", "#000000"))
    for curve in panel.curves:
        last = curve.points[-1]
        ends.append((100 * last.score.value, curve.name, looks[curve.name]["color"]))
    ends.sort(key=lambda end: end[0])
    places = spread([(value - low) / (high - low) for value, _, _ in ends], gap)
    # Where many lines end near the bottom, labels go up, not below the axis.
    places = [max(place, gap * number) for number, place in enumerate(places)]
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
    """Return positions near the ascending `wanted` ones, in their order, at least `gap` apart.

    Groups of colliding labels are merged and centred on the mean of what they wanted.
    """
    groups: list[tuple[float, int]] = []
    for value in wanted:
        centre, size = value, 1
        while groups and centre - gap * (size - 1) / 2 < _top(groups[-1], gap) + gap:
            other, count = groups.pop()
            centre = (other * count + centre * size) / (count + size)
            size += count
        groups.append((centre, size))
    return [
        centre + gap * (place - (size - 1) / 2) for centre, size in groups for place in range(size)
    ]


def _top(group: tuple[float, int], gap: float) -> float:
    centre, size = group
    return centre + gap * (size - 1) / 2
