"""Tables and a figure of denoised answers.

`python -m espalier.harness.reports.curves.diffusion_report --store results --write lab/measured/diffusion`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError
from espalier.harness.reports.curves.curve_points import CONTROLS, FLOOR, BaselineGroup, share
from espalier.harness.reports.curves.curve_table import gains, markdown_table
from espalier.harness.reports.curves.figures import Plot, Series, draw, percent_spot
from espalier.harness.reports.curves.metric_names import readable
from espalier.harness.reports.curves.plot_style import DASHES, line_look, looks
from espalier.harness.reports.curves.report_page import (
    Written,
    config_names,
    report_command,
    texts,
    write_page,
)
from espalier.harness.reports.curves.step_panels import CostPoint, StepPanel, read_step_panels
from espalier.harness.specs.commands import RUN
from espalier.harness.store.unparsed_mark import FOOTNOTE

#: The method shown at every number of steps.
FOLLOWED = "d3tom"

INTRO, BOUGHT, TABLES = texts("denoisers")


def write_diffusion(
    store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
) -> Written:
    """Write `README.md` and a figure (`merging`) of a store's denoised answers.

    Raises:
        UserError: as `read_step_panels`, or there is no result of random tokens.
    """
    by_benchmark = read_step_panels(store, model, where)
    panels = [panel for step_panels in by_benchmark.values() for panel in step_panels]
    curves = {curve.name for step_panel in panels for curve in step_panel.panel.curves}
    names = config_names({curve.split()[0] for curve in curves}, Budget("kept", 0.0))
    parts = [INTRO.format(followed=FOLLOWED), BOUGHT.format(followed=FOLLOWED)]
    parts += [_cost_table(benchmark, group) for benchmark, group in by_benchmark.items()]
    parts += [TABLES, *(_table(step_panel, names) for step_panel in panels)]
    if any(FOOTNOTE in step_panel.panel.notes for step_panel in panels):
        parts.append(f"{FOOTNOTE}.\n")
    return write_page(folder, parts, {"merging": draw_merging(by_benchmark, names)})


def _table(step_panel: StepPanel, names: dict[str, str]) -> str:
    """Return the scores of one benchmark at one number of steps, random tokens first."""
    panel = step_panel.panel
    curves = sorted(panel.curves, key=lambda curve: (curve.name != FLOOR, curve.title(names)))
    if not curves or curves[0].name != FLOOR:
        raise UserError(
            f"no rows of method={FLOOR} on {panel.benchmark} in {step_panel.steps} steps to compare; valid: a store "
            f"of `{RUN} +experiment=diffusion`"
        )
    table = gains(panel, BaselineGroup(curves[0], tuple(curves[1:])), names)
    return (
        f"### {panel.benchmark}, {step_panel.steps} steps\n\n{panel.metric} on {panel.n_samples} samples, answers of "
        f"{step_panel.length} places{panel.full_text('with every token')}.\n\n{table}"
    )


def _cost_table(benchmark: str, step_panels: Sequence[StepPanel]) -> str:
    """Return score and cost of the followed method: a line for each number of steps, a column for each share."""
    ratios = sorted({0.0, *(ratio for panel in step_panels for ratio in panel.panel.ratios)})
    lines = []
    for step_panel in step_panels:
        points = [*step_panel.unpruned, *(p for p in step_panel.points(FOLLOWED) if p.point.ratio)]
        cells = {
            cost.point.ratio: f"{cost.point.score.percent}{cost.point.mark}; {cost.flops / 1e9:.2f}; {cost.ms:.0f}"
            for cost in points
        }
        lines.append([str(step_panel.steps), *(cells.get(ratio, "-") for ratio in ratios)])
    table = markdown_table(["steps", *map(share, ratios)], lines, "r")
    return f"### {benchmark}\n\n{table}"


def draw_merging(
    by_benchmark: Mapping[str, Sequence[StepPanel]], names: Mapping[str, str]
) -> Figure:
    """Return the figure, a column for each benchmark: by time and by FLOPs over ratios, by steps at the largest ratio.

    Curves over ratios are those of the most steps, of `FOLLOWED` of every number; the unpruned model's is over steps.
    """
    curves = {
        curve.name: curve
        for group in by_benchmark.values()
        for panel in group
        for curve in panel.panel.curves
    }
    shapes = looks((name, name.split()[0] in CONTROLS) for name in curves)
    styles = {curve.title(names): (name, line_look(shapes[name])) for name, curve in curves.items()}
    rows: list[list[Plot]] = [[], [], []]
    for benchmark, group in by_benchmark.items():
        panel, ratio = group[0].panel, group[0].panel.ratios[-1]
        look: dict[str, Any] = {"values": f"{readable(panel.metric)} (%)", "title": benchmark}
        samples = f"{panel.n_samples} samples, {group[0].length} places"
        for plots, places, cost in (
            (rows[0], "milliseconds an answer", lambda cost: cost.ms),
            (rows[1], "GFLOP an answer, decoder and head", lambda cost: cost.flops / 1e9),
        ):
            series = [*_along_ratios(group, styles, cost), _unpruned(group, cost, " steps")]
            plots.append(Plot("scatter", series=series, note=samples, places=places, **look))
        series = [
            Series(name, _spots(_at(group, curve, ratio), lambda cost: cost.steps), style)
            for name, (curve, style) in styles.items()
        ]
        series.append(_unpruned(group, lambda cost: cost.steps))
        steps = {float(panel.steps): str(panel.steps) for panel in group}
        note = f"{panel.heading(ratio)} of the tokens kept"
        places = "denoising steps (log scale)"
        plot = Plot("scatter", series=series, note=note, places=places, ticks=steps, **look)
        rows[2].append(replace(plot, log=True, shift=0.03))
    return draw(
        [plot for row in rows for plot in row],
        foot="Bars: 95 % intervals. Hollow: controls, which no paper proposes.",
        columns=2 if len(by_benchmark) == 2 else 1,
    )


def _along_ratios(
    group: Sequence[StepPanel],
    styles: Mapping[str, tuple[str, dict[str, Any]]],
    cost: Callable[[CostPoint], float],
) -> list[Series]:
    """Return every curve at the most steps, and the followed one at fewer."""
    first, *fewer = group
    series = [
        Series(name, _spots(first.points(curve, full=True), cost, bare=True), style, key=True)
        for name, (curve, style) in styles.items()
        if first.points(curve)
    ]
    followed = [(name, style) for name, (curve, style) in styles.items() if curve == FOLLOWED]
    for dashes, panel in zip(DASHES[1:], fewer, strict=False):
        for name, style in followed if panel.points(FOLLOWED) else ():
            spots = _spots(panel.points(FOLLOWED, full=True), cost, bare=True)
            look = {**style, "linestyle": (0, dashes)}
            series.append(Series(f"{name}, {panel.steps} steps", spots, look, key=True))
    return series


def _at(group: Sequence[StepPanel], curve: str, ratio: float) -> list[CostPoint]:
    return [cost for panel in group for cost in panel.points(curve) if cost.point.ratio == ratio]


def _unpruned(
    group: Sequence[StepPanel], cost: Callable[[CostPoint], float], words: str = ""
) -> Series:
    """Return the unpruned model over its numbers of steps."""
    spots = [
        replace(spot, text=f"{point.steps}{words}" if words else "")
        for panel in group
        for point in panel.unpruned
        for spot in _spots([point], cost)
    ]
    look = {"color": "#000000", "marker": "o", "markersize": 6.5, "linewidth": 2.0, "zorder": 4}
    return Series("every token", spots, look, key=True)


def _spots(
    points: Sequence[CostPoint], cost: Callable[[CostPoint], float], bare: bool = False
) -> list[Any]:
    return [percent_spot(cost(point), point.point.score, bare=bare) for point in points]


main = report_command("diffusion_report", __doc__, write_diffusion)

if __name__ == "__main__":
    sys.exit(main())
