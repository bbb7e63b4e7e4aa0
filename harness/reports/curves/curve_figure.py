"""The figure of curves: score by share removed, a plot for each benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from espalier.harness.reports.curves.curve_points import CurvePanel
from espalier.harness.reports.curves.figures import (
    NOTE,
    Plot,
    Series,
    draw,
    line_look,
    looks,
    percent_spot,
)
from espalier.harness.reports.printed_text import readable
from espalier.harness.stats import Interval
from espalier.harness.store.row_text import FOOTNOTE


def draw_curves(
    panels: Sequence[CurvePanel],
    of: str = "visual tokens",
    names: Mapping[str, str] | None = None,
) -> Figure:
    """Return the figure: score by share removed, a plot for each benchmark; a method looks the same in all.

    Args:
        panels: one for each benchmark.
        of: the things that the methods remove, for the axis label.
        names: of config files; if given, only curves that bear their methods' plain names are drawn.
    """
    if names is not None:
        panels = [panel.plain(names) for panel in panels]
    looks_by_name = looks(
        pair
        for panel in panels
        for pair in zip(panel.points.curve, panel.points.control, strict=True)
    )
    plots = []
    for panel in panels:
        counts = [panel.keep(ratio) for ratio in panel.ratios]
        counted = bool(counts) and None not in counts
        places = _places(panel.ratios)
        # The interval at ratio 0 is the unpruned model's.
        bare = {0.0} if panel.full is not None else set()
        level = None
        if panel.full is not None:
            ends = (100 * end for end in (panel.full.value, panel.full.low, panel.full.high))
            level = f"unpruned{panel.full_mark}", Interval(*ends)
        series = [
            Series(
                name,
                [
                    percent_spot(places[p.ratio], p.score, p.mark, bare=p.ratio in bare)
                    for p in points.itertuples()
                ],
                line_look(looks_by_name[name]),
                # The lightest grey is too light for letters.
                NOTE if points.control.iloc[0] else looks_by_name[name]["color"],
            )
            for name, points in panel.points.groupby("curve", sort=False)
        ]
        plots.append(
            Plot(
                "curve",
                panel.benchmark,
                series,
                note=f"{readable(panel.metric)}, {panel.n_samples} samples",
                places=f"{of} kept" if counted else f"{of} removed (%)",
                values="score (%)",
                ticks={
                    places[ratio]: str(count) if counted else f"{100 * ratio:.4g}"
                    for ratio, count in zip(panel.ratios, counts, strict=True)
                },
                log=True,
                level=level,
                shift=0.012,
            )
        )
    foot = "Bars and grey bands: 95 % intervals. Grey names: controls, which no paper proposes. Log scales."
    if any(FOOTNOTE in panel.notes for panel in panels):
        foot += f"\n{FOOTNOTE}."
    return draw(plots, foot=foot)


def _places(ratios: Sequence[float]) -> dict[float, float]:
    """Return the place of each ratio on a log axis: equal steps remove equal shares of the rest; all is a last step."""
    places = {ratio: 1 / (1 - ratio) for ratio in ratios if ratio < 1}
    last = 2 * max(places.values(), default=1.0)
    return places | {ratio: last for ratio in ratios if ratio not in places}
