"""The figure of a report: a row for each method, a column for each ratio, gains over random dropping as dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from espalier.harness.reports.curves.curve_points import Curve, CurvePanel, CurvePoint
from espalier.harness.reports.curves.metric_names import readable
from espalier.harness.reports.curves.plot_style import GRID, NOTE
from espalier.harness.reports.curves.random_baselines import BaselineGroup, at, title_of, verdict
from espalier.harness.store.unparsed_mark import FOOTNOTE

#: Sizes in inches: a row, the space above and below all rows, a column, one letter of a name.
ROW, AROUND, COLUMN, LETTER = 0.185, 1.15, 2.35, 0.075

LINE = "#8A8A8A"
#: Edge and face colour of a dot; hollow without a difference. Blue and orange are colour-blind safe.
DOTS = {
    "above": ("#0072B2", "#0072B2"),
    "below": ("#D55E00", "#D55E00"),
    "": ("#6E6E6E", "#FFFFFF"),
}


def draw_dots(
    panel: CurvePanel, groups: Sequence[BaselineGroup], names: Mapping[str, str]
) -> Figure:
    """Return the figure; dots are gains over random dropping with paired intervals, with scores to the right.

    Draw and save inside `matplotlib.rc_context(STYLE)`.
    """
    rows: list[tuple[str, bool]] = []
    for group in groups:
        rows.append((group.title, True))
        rows += [(_name(curve, group, names), False) for curve in group.curves]
    wide = COLUMN * len(panel.ratios) + LETTER * max(
        (len(name) for name, head in rows if not head), default=0
    )
    figure = Figure(figsize=(wide, ROW * len(rows) + AROUND), layout="constrained")
    columns = figure.subplots(1, len(panel.ratios), sharex=True, sharey=True, squeeze=False)[0]
    for axes, ratio in zip(columns, panel.ratios, strict=True):
        _draw_ratio(axes, panel, groups, ratio, names)
        removed = f"{100 * ratio:.4g} % of the tokens removed"
        title = removed if panel.keep(ratio) is None else panel.heading(ratio)
        axes.set_title(title, fontsize=9.5)
    first = columns[0]
    first.set_ylim(len(rows) - 0.4, -0.6)
    first.set_yticks(range(len(rows)), [name for name, _ in rows])
    for tick, (_, heading) in zip(first.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if heading else "normal")
    left, right = first.get_xlim()
    # Scores are printed to the right of the longest whisker.
    first.set_xlim(left, right + 0.2 * (right - left))
    figure.supxlabel(
        "points above random tokens at the same place, paired 95 % intervals; to the right the score in percent"
        + (f"\n{FOOTNOTE}" if FOOTNOTE in panel.notes else ""),
        fontsize=9,
    )
    figure.legend(
        handles=_legend(panel),
        loc="outside upper left",
        ncols=6,
        frameon=False,
        fontsize=8.5,
        title=f"{panel.benchmark}: {readable(panel.metric)}, {panel.n_samples} samples, methods against random tokens",
        title_fontproperties={"size": 10.5, "weight": "bold"},
        alignment="left",
    )
    return figure


def _draw_ratio(
    axes: Axes,
    panel: CurvePanel,
    groups: Sequence[BaselineGroup],
    ratio: float,
    names: Mapping[str, str],
) -> None:
    row = 0
    axes.axvline(0, color=LINE, linewidth=1.0, zorder=1)
    for group in groups:
        end = row + len(group.curves) + 0.5
        floor = at(group.floor, ratio)
        if floor is not None:
            _draw_floor(axes, panel, floor, title_of(group.floor, names), row, end)
        for offset, curve in enumerate(group.curves):
            _draw_dot(axes, curve, ratio, row + 1 + offset)
        row += len(group.curves) + 1
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=3)


def _draw_floor(
    axes: Axes, panel: CurvePanel, floor: CurvePoint, name: str, row: int, bottom: float
) -> None:
    """Write random dropping's score above its rows, and draw the unpruned model's gain over it as a line."""
    if panel.full is not None:
        gain = 100 * (panel.full.value - floor.score.value)
        dashes = (0, (4, 3))
        axes.plot(
            [gain, gain], [row + 0.5, bottom], color="#000000", linewidth=0.9, linestyle=dashes
        )
    _write(axes, row, f"{name}: {100 * floor.score.value:.1f}{floor.mark}")


def _draw_dot(axes: Axes, curve: Curve, ratio: float, row: int) -> None:
    point = at(curve, ratio)
    if point is None or point.gain is None:
        _write(axes, row, "-" if point is None else f"{100 * point.score.value:.1f}{point.mark}")
        return
    edge, face = DOTS[verdict(point)]
    axes.plot(
        [100 * point.gain.low, 100 * point.gain.high],
        [row, row],
        color=edge,
        linewidth=1.1,
        zorder=3,
    )
    axes.plot(
        100 * point.gain.value,
        row,
        "s" if curve.control else "o",
        markersize=4.6,
        markeredgecolor=edge,
        markerfacecolor=face,
        zorder=4,
    )
    _write(axes, row, f"{100 * point.score.value:.1f}{point.mark}")


def _write(axes: Axes, row: int, words: str) -> None:
    """Write a score to the right of a row."""
    axes.text(
        1.0,
        row,
        words,
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="center",
        fontsize=7.5,
        color=NOTE,
    )


def _name(curve: Curve, group: BaselineGroup, names: Mapping[str, str]) -> str:
    where = f" (layer {curve.layer})" if curve.layer != group.floor.layer else ""
    return f"{title_of(curve, names)}{where}"


def _legend(panel: CurvePanel) -> list[Line2D]:
    words = {"above": "above random", "below": "below random", "": "no difference seen"}
    handles: list[Line2D] = [
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
    square = {"marker": "s", "linestyle": "", "color": DOTS[""][0], "markerfacecolor": DOTS[""][1]}
    handles.append(Line2D([], [], markersize=4.6, label="control", **square))  # type: ignore[arg-type]
    if panel.full is not None:
        handles.append(
            Line2D([], [], color="#000000", linewidth=0.9, linestyle=(0, (4, 3)), label="unpruned")
        )
    return handles
