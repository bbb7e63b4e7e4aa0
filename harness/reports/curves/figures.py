"""Figures of all reports, in one style and four shapes: curves, dots, bars and scatters, side by side on a page.

A figure is as wide as a page (`WIDE`), so that its letters can be read where a README shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from espalier.harness.api.notebook_figure import Drawing
from espalier.harness.errors import FOREIGN
from espalier.harness.stats import Interval

#: Errors of drawing names and numbers of rows.
UNDRAWABLE: tuple[type[Exception], ...] = (*FOREIGN, RuntimeError)


#: Okabe and Ito's colour-blind safe palette, without its yellow (too light for lines).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Greys for controls; dashes and markers also distinguish them.
GREYS = ("#4D4D4D", "#7A7A7A", "#A0A0A0")
#: Dash patterns for matplotlib and SVG: lengths drawn and skipped, in line widths.
DASHES = ((), (5.0, 2.0), (1.2, 1.6), (6.0, 1.6, 1.2, 1.6))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
INK = "#222222"
NOTE = "#666666"
GRID = "#E6E6E6"

#: Dots per inch of a PNG.
RESOLUTION = 150

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    # A fixed salt: equal data gives equal bytes.
    "svg.hashsalt": "curves",
    "svg.fonttype": "none",
}

#: Sizes in inches: the page, a plot without its text, that text, a row, a line of labels, one letter of a label.
WIDE, PLOT, AROUND, ROW, LINE, LETTER = 7.2, 1.9, 0.75, 0.19, 0.15, 0.065

#: Letters of a name beside a plot; longer ones are cut.
NAME = 34

#: Ratio of the ends below which a log axis has ticks of an ordinary one.
NARROW = 50

#: A dashed line for what others are compared with.
DASHED: Mapping[str, Any] = {"color": "#000000", "linewidth": 1.1, "linestyle": (0, (4, 3))}

Shape = Literal["curve", "dots", "bars", "scatter"]


@dataclass(frozen=True)
class Spot:
    """One number of a plot.

    Attributes:
        at: its place: along the axis of a curve or scatter, or the row of dots and bars.
        value: the number; None where there is only text.
        low: lower end of its interval.
        high: upper end of its interval.
        text: beside the mark of a curve or scatter, at the right end of a row.
    """

    at: float
    value: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""

    @property
    def has_interval(self) -> bool:
        """Whether it has an interval with a length."""
        return self.low is not None and self.high is not None and self.low < self.high


def percent_spot(at: float, interval: Interval, text: str = "", bare: bool = False) -> Spot:
    """Return a spot of a share in percent, `bare` without its interval."""
    if bare:
        return Spot(at, 100 * interval.value, text=text)
    return Spot(at, 100 * interval.value, 100 * interval.low, 100 * interval.high, text)


@dataclass(frozen=True)
class Series:
    """Spots that share a look.

    Attributes:
        look: matplotlib options of a line.
        label: colour of its direct label at the end of a curve; None without label.
        solid: whether it is drawn as bars.
        key: whether the legend has it.
    """

    name: str
    spots: Sequence[Spot]
    look: Mapping[str, Any]
    label: str | None = None
    solid: bool = False
    key: bool = False


@dataclass(frozen=True)
class Plot:
    """One plot of a figure.

    Attributes:
        note: second line of the title, in grey.
        places: label of the axis of places.
        values: label of the axis of values.
        ticks: names of places; those of `heads` are bold.
        log: whether places are on a log scale.
        log_values: whether values are.
        level: a value that is drawn across the plot, with its interval, and its name.
        shift: by how much neighbouring series are moved apart, so that their intervals do not overlap: a share of the
            place if `log`, else in units of the axis.
        from_zero: whether values start at 0.
    """

    shape: Shape
    title: str
    series: Sequence[Series]
    note: str = ""
    places: str = ""
    values: str = ""
    ticks: Mapping[float, str] = field(default_factory=dict)
    heads: frozenset[float] = frozenset()
    log: bool = False
    log_values: bool = False
    level: tuple[str, Interval] | None = None
    shift: float = 0.0
    from_zero: bool = False

    @property
    def rows(self) -> bool:
        """Whether places are rows, and values run to the right."""
        return self.shape in ("dots", "bars")

    @property
    def labels(self) -> list[str]:
        """Names next to the plot."""
        names = [series.name for series in self.series if series.label is not None]
        return [*names, *([self.level[0]] if self.level is not None and names else [])]

    @property
    def height(self) -> float:
        """Height in inches."""
        if self.rows:
            return ROW * (len(self.ticks) + 1) + AROUND
        return max(PLOT, LINE * (len(self.labels) + 2)) + AROUND


@rc_context(STYLE)
def draw(
    plots: Sequence[Plot], title: str = "", foot: str = "", columns: int = 2, shared: bool = False
) -> Figure:
    """Return the figure: the title and the legend above, the plots row by row, `foot` below.

    Args:
        plots: all of them.
        title: of the figure.
        foot: lines on how it was made.
        columns: plots side by side; one if the names beside a plot are too long for two.
        shared: whether all plots have the axes of the first, which alone names rows.
    """
    longest = max((len(name) for plot in plots for name in plot.labels), default=0)
    columns = min(columns if LETTER * min(longest, NAME) < WIDE / 4 else 1, len(plots))
    lines = [plots[start : start + columns] for start in range(0, len(plots), columns)]
    heights = [max(plot.height for plot in line) for line in lines]
    handles = _handles(plots)
    room = 0.3 * bool(title) + LINE * (foot.count("\n") + 2) * bool(foot)
    figure = Drawing(
        figsize=(WIDE, sum(heights) + room + 0.2 * math.ceil(len(handles) / 3)),
        layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.06),
    )
    row_shapes = plots[0].rows
    grid = figure.subplots(
        len(lines),
        columns,
        squeeze=False,
        height_ratios=heights,
        sharex=shared,
        sharey=shared and row_shapes,
    )
    for axes, plot in zip_longest(grid.flat, plots):
        if plot is None:
            axes.set_axis_off()
        else:
            _draw_plot(axes, plot)
    for axes, plot in [*zip(grid.flat, plots, strict=False)][: 1 if shared else None]:
        if plot.rows and any(spot.text for series in plot.series for spot in series.spots):
            # Text is to the right of the longest interval.
            start, end = axes.get_xlim()
            axes.set_xlim(start, end + (0.1 if plot.from_zero else 0.3) * (end - start))
    if shared:
        for axes in list(grid.flat)[max(0, len(plots) - columns) : len(plots)]:
            axes.tick_params(labelbottom=True)
    if handles or title:
        figure.legend(
            handles=handles,
            loc="outside upper left",
            ncols=2 if len(handles) in (2, 4) else 3,
            frameon=False,
            fontsize=8.5,
            handlelength=2.6,
            title=title,
            title_fontproperties={"size": 10.5, "weight": "bold"},
            alignment="left",
        )
    if foot:
        figure.supxlabel(foot, x=0.01, ha="left", fontsize=8, color=NOTE)
    return figure


def save(figure: Figure, path: Path, kinds: Iterable[str] = ("png", "svg")) -> list[Path]:
    """Write a figure as `<path>.png` and `.svg`, or as the kinds listed; return the files."""
    paths = [path.with_name(f"{path.name}.{kind}") for kind in kinds]
    with rc_context(STYLE):
        for kind, file in zip(kinds, paths, strict=True):
            # No date: equal data gives equal bytes.
            options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {}
            figure.savefig(file, dpi=RESOLUTION, **options)
    return paths


def _handles(plots: Sequence[Plot]) -> list[Artist]:
    """Return a legend entry for each series that has one and for levels without a label, the first of each name."""
    handles: dict[str, Artist] = {}
    for plot in plots:
        for series in plot.series:
            if series.key and series.solid:
                patch = Patch(label=series.name, color=series.look["color"])
                handles.setdefault(series.name, patch)
            elif series.key:
                handles.setdefault(series.name, Line2D([], [], label=series.name, **series.look))
        if plot.level is not None and not plot.labels:
            handles.setdefault(plot.level[0], Line2D([], [], label=plot.level[0], **DASHED))
    return [*handles.values()]


def _draw_plot(axes: Axes, plot: Plot) -> None:
    value_axis, place_axis = (axes.xaxis, axes.yaxis) if plot.rows else (axes.yaxis, axes.xaxis)
    place_axis.set_label_text(plot.places)
    value_axis.set_label_text(plot.values)
    # Before anything is drawn: later limits follow the scale.
    if plot.log:
        axes.set_xscale("log")
    if plot.log_values:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for number, series in enumerate(plot.series):
        moved = plot.shift * (number - (len(plot.series) - 1) / 2)
        _draw_series(axes, plot, series, moved)
    low, high = axes.get_ylim()
    if plot.log_values and high < NARROW * low:
        # Its own ticks are powers of ten, and a narrow range may have none.
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_minor_locator(NullLocator())
    if plot.ticks:
        ticks = place_axis.set_ticks([*plot.ticks], [_short(name) for name in plot.ticks.values()])
        place_axis.set_minor_locator(NullLocator())
        for tick, at in zip(ticks, plot.ticks, strict=True):
            tick.label1.set_fontweight("bold" if at in plot.heads else "normal")
    if not plot.series:
        value_axis.set_ticks([])
    if plot.level is not None:
        _draw_level(axes, plot, plot.level[1])
    if plot.rows:
        axes.set_ylim(len(plot.ticks) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
    axes.margins(y=0.08)
    if plot.from_zero:
        (axes.set_xlim if plot.rows else axes.set_ylim)(0)
    hidden = ["top", "right", "left"] if plot.rows else ["top", "right"]
    axes.spines[hidden].set_visible(False)
    axes.grid(axis="x" if plot.rows else "y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0 if plot.rows else 3, labelsize=8.5)
    axes.set_title(
        plot.title, loc="left", fontsize=9.5, fontweight="bold", pad=16 * bool(plot.note) + 4
    )
    if plot.note:
        place: dict[str, Any] = {"xy": (0, 1), "xytext": (0, 5), "xycoords": "axes fraction"}
        axes.annotate(plot.note, **place, textcoords="offset points", fontsize=8, color=NOTE)
    if plot.labels:
        _label(axes, plot)


def _draw_series(axes: Axes, plot: Plot, series: Series, moved: float) -> None:
    spots = [spot for spot in series.spots if spot.value is not None]
    # Only marks with an interval make room for their neighbours'.
    moves = [moved * spot.has_interval * (spot.at if plot.log else 1) for spot in spots]
    at = [spot.at + move for spot, move in zip(spots, moves, strict=True)]
    values: list[Any] = [spot.value for spot in spots]
    if series.solid:
        axes.barh(at, values, height=0.62, color=series.look["color"], zorder=2)
    else:
        axes.plot(*((values, at) if plot.rows else (at, values)), **series.look)
    lines = partial(axes.hlines if plot.rows else axes.vlines, linewidth=0.9)
    for place, spot in zip(at, spots, strict=True):
        if spot.has_interval:
            lines(place, spot.low, spot.high, color=series.look["color"], zorder=2)
    for spot in series.spots:
        if spot.text and plot.rows:
            look: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 8, "color": NOTE}
            axes.text(1.0, spot.at, spot.text, transform=axes.get_yaxis_transform(), **look)
        elif spot.text and spot.value is not None:
            look = {"textcoords": "offset points", "fontsize": 8, "ha": "center"}
            top = spot.value if spot.high is None else spot.high
            axes.annotate(spot.text, (spot.at, top), (0, 3), **look)


def _draw_level(axes: Axes, plot: Plot, level: Interval) -> None:
    line, band = (axes.axvline, axes.axvspan) if plot.rows else (axes.axhline, axes.axhspan)
    if level.low < level.high:
        band(level.low, level.high, color="#000000", alpha=0.06, linewidth=0)
    line(level.value, zorder=1, **DASHED)


def _label(axes: Axes, plot: Plot) -> None:
    """Write each name at the end of its line, in the order of the ends and apart where names would collide."""
    low, high = axes.get_ylim()
    scale = math.log if plot.log_values else float
    ends: list[tuple[float, str, str]] = []
    if plot.level is not None:
        ends.append((plot.level[1].value, plot.level[0], "#000000"))
    for series in plot.series:
        values = [spot.value for spot in series.spots if spot.value is not None]
        if series.label is not None and values:
            ends.append((values[-1], series.name, series.label))
    ends.sort(key=lambda end: end[0])
    gap = LINE / (plot.height - AROUND)
    heights = [(scale(value) - scale(low)) / (scale(high) - scale(low)) for value, _, _ in ends]
    count = len(ends)
    for number, place in enumerate(spread(heights, gap)):
        _, name, colour = ends[number]
        # Labels stay within the height of the plot: not below its axis, not in its title.
        inside = max(min(place, 0.985 - gap * (count - 1 - number)), gap * number)
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5)}
        axes.annotate(
            _short(name),
            xy=(1.0, heights[number]),
            xytext=(1.06, inside),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops={**line, "shrinkA": 1, "shrinkB": 0},
            annotation_clip=False,
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Return positions near the ascending `wanted` positions, in the same order, at least `gap` apart.

    Groups of colliding labels are merged and centred on the mean of their wanted positions.
    """
    groups: list[tuple[float, int]] = []
    for value in wanted:
        centre, size = value, 1
        # Half of the labels of both groups, and the gap between them.
        while groups and centre - groups[-1][0] < gap * ((size + groups[-1][1]) / 2):
            group_centre, count = groups.pop()
            centre = (group_centre * count + centre * size) / (count + size)
            size += count
        groups.append((centre, size))
    return [
        centre + gap * (position - (size - 1) / 2)
        for centre, size in groups
        for position in range(size)
    ]


def _short(name: str) -> str:
    """Return a name, cut to the width beside a plot."""
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


def marker(shape: str, **look: Any) -> dict[str, Any]:
    """Return the look of marks without a line."""
    return {"marker": shape, "linestyle": "", "color": INK, "markersize": 5, **look}


def looks(names: Iterable[tuple[str, bool]]) -> dict[str, dict[str, Any]]:
    """Give each name its own colour, dashes and marker; controls are grey and never solid.

    Args:
        names: (name, whether it is a control) pairs, in any order.
    """
    looks_by_name: dict[str, dict[str, Any]] = {}
    counts = {True: 0, False: 0}
    for position, (name, control) in enumerate(
        sorted(set(names), key=lambda pair: (pair[1], pair[0]))
    ):
        palette = GREYS if control else COLOURS
        round_number, slot = divmod(counts[control], len(palette))
        counts[control] += 1
        dash = (
            1 + (slot + round_number) % (len(DASHES) - 1) if control else round_number % len(DASHES)
        )
        looks_by_name[name] = {
            "color": palette[slot],
            "dashes": DASHES[dash],
            "marker": MARKERS[position % len(MARKERS)],
            "control": control,
        }
    return looks_by_name


def line_look(look: dict[str, Any]) -> dict[str, Any]:
    """Return a look as matplotlib line options; control markers are hollow."""
    control, colour = look["control"], look["color"]
    dashes: Any = (0, look["dashes"]) if look["dashes"] else "-"
    return {
        "color": colour,
        "linestyle": dashes,
        "linewidth": 1.3 if control else 1.6,
        "marker": look["marker"],
        "markersize": 4.8,
        "markerfacecolor": "white" if control else colour,
        "markeredgecolor": colour if control else "white",
        "markeredgewidth": 1.0 if control else 0.6,
        "zorder": 2 if control else 3,
    }
