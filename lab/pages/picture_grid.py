"""The form of the pictures of scores: a row for each method and share kept, a panel for each benchmark.

Names stand to the left of their rows, so no label crosses another. An estimate is a mark with its 95 % interval; the
shape of the mark alone shows its meaning, so the picture can be read in grey. Sizes are for 700 pixels across.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from espalier.harness.stats import Interval

#: Sizes in inches: the picture's width, a row, the space between methods, the space above and below all rows.
WIDTH, ROW, GAP, AROUND = 7.0, 0.135, 0.6, 1.05
#: Points; 8 are 11 pixels in a picture of 700.
SMALL, LARGE = 8.0, 10.0
#: Points that a letter of a share takes.
LETTER = 5.2
INK, NOTE, GRID, BAND = "#222222", "#666666", "#E6E6E6", "#F4F4F4"


class Mark(Enum):
    """What an estimate shows: shape, colour, and whether the mark is filled."""

    BETTER = ("^", "#0072B2", True)
    WORSE = ("v", "#D55E00", True)
    OPEN = ("o", "#6E6E6E", False)
    METHOD = ("o", "#0072B2", True)
    SECOND = ("D", "#D55E00", False)


@dataclass(frozen=True)
class Estimate:
    """A value in percent, points or multiples, with its 95 % interval; the interval is None where none was measured."""

    value: float
    interval: tuple[float, float] | None
    mark: Mark

    @staticmethod
    def percent(interval: Interval, mark: Mark) -> Estimate:
        """Return an interval of shares in percent."""
        low, value, high = (100 * end for end in (interval.low, interval.value, interval.high))
        return Estimate(value, (low, high), mark)


@dataclass(frozen=True)
class GridPanel:
    """One benchmark.

    Attributes:
        title: one or two lines.
        estimates: by method and share, each with the marks of its row.
        line: position of a dashed vertical line, such as the unpruned model's score.
        band: interval of `line`.
    """

    title: str
    estimates: Mapping[tuple[str, str], Sequence[Estimate]]
    line: float | None = None
    band: tuple[float, float] | None = None


@dataclass(frozen=True)
class PictureGrid:
    """A picture: panels side by side over the same rows, and what their marks and lines mean."""

    title: str
    unit: str
    panels: Sequence[GridPanel]
    meanings: Mapping[Mark, str]
    line_meaning: str = ""
    zero: bool = False

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Methods in the order of the first panel that has them, and their shares."""
        return list(dict.fromkeys(row for panel in self.panels for row in panel.estimates))


def draw_grid(grid: PictureGrid) -> Figure:
    """Return the picture. Draw and save inside `matplotlib.rc_context(STYLE)`."""
    places, ends = _places(grid.rows)
    figure = Figure(
        figsize=(WIDTH, ROW * (max(places.values()) + 1) + AROUND), layout="constrained"
    )
    axes = figure.subplots(1, len(grid.panels), sharex=True, sharey=True, squeeze=False)[0]
    for place, panel in zip(axes, grid.panels, strict=True):
        _draw_panel(place, panel, grid, places, ends)
    axes[0].set_ylim(max(places.values()) + 0.8, -0.8)
    _name_rows(axes[0], places, ends)
    figure.supxlabel(grid.unit, fontsize=SMALL, color=INK)
    figure.legend(
        handles=_legend(grid),
        loc="outside upper left",
        ncols=4,
        frameon=False,
        fontsize=SMALL,
        title=grid.title,
        title_fontproperties={"size": LARGE, "weight": "bold"},
        alignment="left",
        handletextpad=0.4,
        columnspacing=1.4,
    )
    return figure


def _places(
    rows: Sequence[tuple[str, str]],
) -> tuple[dict[tuple[str, str], float], dict[str, tuple[float, float]]]:
    """Return the height of each row, and the first and last height of each method."""
    places: dict[tuple[str, str], float] = {}
    ends: dict[str, tuple[float, float]] = {}
    height = 0.0
    for number, row in enumerate(rows):
        if number and row[0] != rows[number - 1][0]:
            height += GAP
        places[row] = height
        ends[row[0]] = (ends.get(row[0], (height, height))[0], height)
        height += 1
    return places, ends


def _draw_panel(
    axes: Axes,
    panel: GridPanel,
    grid: PictureGrid,
    places: Mapping[tuple[str, str], float],
    ends: Mapping[str, tuple[float, float]],
) -> None:
    for first, last in list(ends.values())[::2]:
        axes.axhspan(first - 0.75, last + 0.75, color=BAND, linewidth=0, zorder=0)
    if panel.band is not None:
        axes.axvspan(*panel.band, color="#000000", alpha=0.08, linewidth=0, zorder=0.5)
    if grid.zero:
        axes.axvline(0, color=INK, linewidth=0.9, zorder=1)
    if panel.line is not None:
        axes.axvline(panel.line, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for row, estimates in panel.estimates.items():
        for estimate in estimates:
            shape, colour, filled = estimate.mark.value
            height = places[row]
            if estimate.interval is not None:
                axes.plot(estimate.interval, [height, height], color=colour, linewidth=1.1)
            axes.plot(
                estimate.value,
                height,
                shape,
                markersize=4.4,
                markeredgecolor=colour,
                markerfacecolor=colour if filled else "white",
                zorder=4,
            )
    axes.set_title(panel.title, loc="left", fontsize=SMALL, fontweight="bold")
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=SMALL)


def _name_rows(
    axes: Axes,
    places: Mapping[tuple[str, str], float],
    ends: Mapping[str, tuple[float, float]],
) -> None:
    """Write each row's share next to it, and each method's name in front of its shares."""
    if any(share for _, share in places):
        axes.set_yticks(list(places.values()), [share for _, share in places], fontsize=SMALL)
        widest = max(len(share) for _, share in places)
        for name, (first, last) in ends.items():
            axes.annotate(
                name,
                (0, (first + last) / 2),
                (-LETTER * widest - 10, 0),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=SMALL,
                fontweight="bold",
            )
    else:
        axes.set_yticks(list(places.values()), [name for name, _ in places], fontsize=SMALL)


def _legend(grid: PictureGrid) -> list[Line2D]:
    handles = []
    for mark, meaning in grid.meanings.items():
        shape, colour, filled = mark.value
        look = {"marker": shape, "markersize": 4.4, "markeredgecolor": colour}
        face = colour if filled else "white"
        handles.append(
            Line2D([], [], color=colour, label=meaning, markerfacecolor=face, **look)  # type: ignore[arg-type]
        )
    if grid.line_meaning:
        handles.append(
            Line2D([], [], color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label=grid.line_meaning)
        )
    return handles
