"""The picture of a report: a row for each method, a column for each ratio, random dropping as a band behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from harness.report.data import Curve, Panel
from harness.report.groups import Group, at, title_of, verdict

#: In inches: a row, what stands above and below them all, a column, a letter of a name.
ROW, AROUND, COLUMN, LETTER = 0.185, 1.15, 2.35, 0.075

BAND, LINE = "#DCDCDC", "#8A8A8A"
#: Edge and face of a dot; hollow where no difference was seen. Blue and orange differ for all kinds of colour vision.
DOTS = {
    "above": ("#0072B2", "#0072B2"),
    "below": ("#D55E00", "#D55E00"),
    "": ("#6E6E6E", "#FFFFFF"),
}


def draw_dots(panel: Panel, groups: Sequence[Group], names: Mapping[str, str]) -> Figure:
    """Return the figure; whiskers are the paired intervals of the gain, so that one off the line of random is coloured.

    Drawing and saving both belong inside `matplotlib.rc_context(STYLE)`.
    """
    rows: list[tuple[str, bool]] = []
    for group in groups:
        rows.append((group.title, True))
        rows += [(_name(curve, group, names), False) for curve in group.curves]
    wide = COLUMN * len(panel.ratios) + LETTER * max(len(name) for name, head in rows if not head)
    figure = Figure(figsize=(wide, ROW * len(rows) + AROUND), layout="constrained")
    columns = figure.subplots(1, len(panel.ratios), sharex=True, sharey=True, squeeze=False)[0]
    for axes, ratio in zip(columns, panel.ratios, strict=True):
        _draw_ratio(axes, panel, groups, ratio, names)
        axes.set_title(f"{100 * (1 - ratio):.4g} % kept", fontsize=9.5)
    first = columns[0]
    first.set_ylim(len(rows) - 0.4, -0.6)
    first.set_yticks(range(len(rows)), [name for name, _ in rows])
    for tick, (_, heading) in zip(first.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if heading else "normal")
    left, right = first.get_xlim()
    # Whiskers may leave the scale, since they are differences.
    first.set_xlim(max(left, -3.0), min(right, 103.0))
    figure.supxlabel(f"{panel.metric} (%)", fontsize=9)
    figure.legend(
        handles=_legend(panel),
        loc="outside upper left",
        ncols=6,
        frameon=False,
        fontsize=8.5,
        title=f"{panel.benchmark}: {panel.metric} of {panel.n_samples} samples, each method against random tokens",
        title_fontproperties={"size": 10.5, "weight": "bold"},
        alignment="left",
    )
    return figure


def _draw_ratio(
    axes: Axes, panel: Panel, groups: Sequence[Group], ratio: float, names: Mapping[str, str]
) -> None:
    place = 0
    for group in groups:
        name, end = title_of(group.floor, names), place + len(group.curves) + 0.5
        _draw_floor(axes, group.floor, ratio, name, place + 0.5, end)
        for offset, curve in enumerate(group.curves):
            _draw_dot(axes, curve, group.floor, ratio, place + 1 + offset)
        place += len(group.curves) + 1
    if panel.full is not None:
        axes.axvline(
            100 * panel.full.value, color="#000000", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1
        )
    axes.grid(axis="x", color="#EEEEEE", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=3)


def _draw_floor(
    axes: Axes, floor: Curve, ratio: float, name: str, top: float, bottom: float
) -> None:
    """Draw the interval of random dropping behind the rows compared with it, its mean as a line, its name above."""
    point = at(floor, ratio)
    if point is None:
        return
    value, low, high = (100 * end for end in (point.score.value, point.score.low, point.score.high))
    band = Rectangle((low, top), high - low, bottom - top, color=BAND, linewidth=0, zorder=0.6)
    axes.add_patch(band)
    axes.plot([value, value], [top, bottom], color=LINE, linewidth=1.0, zorder=1.5)
    align = "right" if value > 50 else "left"
    axes.text(
        value,
        top - 0.05,
        f"{name} {value:.1f}",
        ha=align,
        va="bottom",
        fontsize=7.5,
        color="#555555",
    )


def _draw_dot(axes: Axes, curve: Curve, floor: Curve, ratio: float, place: int) -> None:
    point, below = at(curve, ratio), at(floor, ratio)
    if point is None:
        axes.text(
            0.5,
            place,
            "-",
            transform=axes.get_yaxis_transform(),
            ha="center",
            va="center",
            color=LINE,
        )
        return
    edge, face = DOTS[verdict(point)]
    if point.gain is not None and below is not None:
        ends = [100 * (below.score.value + end) for end in (point.gain.low, point.gain.high)]
        axes.plot(ends, [place, place], color=edge, linewidth=1.1, zorder=3)
    marker = "s" if curve.control else "o"
    axes.plot(
        100 * point.score.value,
        place,
        marker,
        markersize=4.6,
        markeredgecolor=edge,
        markerfacecolor=face,
        zorder=4,
    )


def _name(curve: Curve, group: Group, names: Mapping[str, str]) -> str:
    where = f" (layer {curve.place})" if curve.place != group.floor.place else ""
    return f"{title_of(curve, names)}{where}"


def _legend(panel: Panel) -> list[Line2D | Patch]:
    words = {"above": "above random", "below": "below random", "": "no difference seen"}
    found: list[Line2D | Patch] = [
        Line2D(
            [],
            [],
            marker="o",
            linestyle="-",
            color=DOTS[kind][0],
            markerfacecolor=DOTS[kind][1],
            markersize=4.6,
            label=text,
        )
        for kind, text in words.items()
    ]
    found.append(Patch(color=BAND, label="random, 95 % interval"))
    square = {"marker": "s", "linestyle": "", "color": DOTS[""][0], "markerfacecolor": DOTS[""][1]}
    found.append(Line2D([], [], markersize=4.6, label="control", **square))  # type: ignore[arg-type]
    if panel.full is not None:
        found.append(
            Line2D(
                [], [], color="#000000", linewidth=0.9, linestyle=(0, (4, 3)), label="all tokens"
            )
        )
    return found
