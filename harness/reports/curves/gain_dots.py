"""The figure of gains over random dropping: a row for each method, a plot for each ratio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from matplotlib.figure import Figure

from espalier.harness.reports.curves.curve_points import BaselineGroup, CurvePanel, CurvePoint
from espalier.harness.reports.curves.figures import DASHED, Plot, Series, Spot, draw, marker
from espalier.harness.reports.curves.metric_names import readable
from espalier.harness.reports.curves.plot_style import COLOURS
from espalier.harness.store.row_text import FOOTNOTE

#: Legend, colour and face of a dot by verdict, apart in greyscale as well.
DOTS: Mapping[str, tuple[str, str, str]] = {
    "above": ("above random", COLOURS[0], COLOURS[0]),
    "below": ("below random", COLOURS[1], "#FFD0AC"),
    "": ("no difference seen", "#6E6E6E", "#FFFFFF"),
}

FOOT = "Points above random tokens at the same place, with paired 95 % intervals; to the right the score in percent."


def draw_gains(
    panel: CurvePanel, groups: Sequence[BaselineGroup], names: Mapping[str, str]
) -> Figure:
    """Return the figure; dots are gains over random dropping with paired intervals, with scores to the right."""
    rows: dict[float, str] = {}
    starts = []
    for group in groups:
        starts.append(len(rows))
        titles = (group.title, *(group.name(curve, names) for curve in group.curves))
        rows |= {len(rows) + offset: title for offset, title in enumerate(titles)}
    plots = [
        Plot(
            "dots",
            panel.heading(ratio) + " kept",
            [
                series
                for start, group in zip(starts, groups, strict=True)
                for series in _series(panel, group, ratio, start, names)
            ],
            ticks=rows,
            heads=frozenset(starts),
        )
        for ratio in panel.ratios
    ]
    title = f"{panel.benchmark}: {readable(panel.metric)}, {panel.n_samples} samples"
    foot = FOOT + (f"\n{FOOTNOTE}" if FOOTNOTE in panel.notes else "")
    return draw(plots, title, foot, columns=len(plots), shared=True)


def _series(
    panel: CurvePanel, group: BaselineGroup, ratio: float, start: int, names: Mapping[str, str]
) -> Iterator[Series]:
    """Yield the dots of a group at a ratio, its random dropping as a line at 0, the unpruned model as a dashed line."""
    end = start + len(group.curves) + 0.5
    zero = {"color": "#8A8A8A", "linewidth": 1.0, "zorder": 1}
    floor = group.floor.at(ratio)
    text = "" if floor is None else f"{group.floor.title(names)}: {_score(floor)}"
    yield Series("random", [Spot(start, 0.0, text=text), Spot(end, 0.0)], zero)
    if floor is not None and panel.full is not None:
        full = 100 * (panel.full.value - floor.score.value)
        yield Series("unpruned", [Spot(start + 0.5, full), Spot(end, full)], DASHED, key=True)
    for row, curve in enumerate(group.curves, start + 1):
        point = curve.at(ratio)
        if point is None or point.gain is None:
            yield Series("", [Spot(row, None, text="-" if point is None else _score(point))], {})
            continue
        name, colour, face = DOTS[point.verdict]
        gain = point.gain
        spot = Spot(row, 100 * gain.value, 100 * gain.low, 100 * gain.high, _score(point))
        look = marker("s" if curve.control else "o", color=colour, markerfacecolor=face, zorder=4)
        yield Series(name + ", control" * curve.control, [spot], look, key=True)


def _score(point: CurvePoint) -> str:
    return f"{100 * point.score.value:.1f}{point.mark}"
