"""Tables and a figure of denoised answers.

`python -m espalier.harness.reports.curves.diffusion_report --store results --write lab/measured/diffusion`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.comparison import panel_of
from espalier.harness.reports.curves.curve_points import (
    FLOOR,
    FULL,
    CurvePanel,
    methods_of,
    share,
    title_of,
)
from espalier.harness.reports.curves.curve_table import gains_over, grid_table
from espalier.harness.reports.curves.figures import (
    COLOURS,
    GREYS,
    Plot,
    Series,
    draw,
    marker,
    percent_spot,
)
from espalier.harness.reports.curves.report_page import CurvesPage, Report, config_names
from espalier.harness.reports.curves.stored_rows import read_results, results_of, tidy
from espalier.harness.reports.printed_text import readable
from espalier.harness.specs.commands import RUN
from espalier.harness.store.row_text import FOOTNOTE

#: The method shown at every number of steps.
FOLLOWED = "d3tom paper"


@dataclass(frozen=True)
class StepPanel:
    """One benchmark at one number of denoising steps.

    Attributes:
        steps: denoising steps of an answer.
        length: positions of an answer.
        panel: scores of all methods.
        costs: FLOPs and milliseconds of an answer by curve name and ratio; the unpruned model's under (`FULL`, 0).
    """

    steps: int
    length: int
    panel: CurvePanel
    costs: dict[tuple[str, float], tuple[float, float]]


def read_step_panels(
    store: Path, model: str | None = None, where: Sequence[str] = ()
) -> dict[str, list[StepPanel]]:
    """Return the panels of each benchmark with denoised answers, by number of steps, most steps first.

    Args:
        store: root of the run store.
        model: required if the store has several.
        where: `key=value` conditions on settings.

    Raises:
        UserError: there are no results, they are of several models and `model` is None, results differ in a setting
            that must be the same, or none is of random tokens.
    """
    results = results_of(
        read_results(store),
        lambda result: (
            result.row["budget_rule"] == "kept" and bool(result.row["extra"].get("diffusion"))
        ),
        "a model that denoises",
        store,
        "diffusion",
        model,
        where,
    )
    frame = tidy(results, length="extra.diffusion.length", steps="extra.diffusion.steps")
    frame["length"], frame["steps"] = frame.length.map(round), frame.steps.map(round)
    panels: dict[str, list[StepPanel]] = {}
    for benchmark, group in frame.groupby("benchmark"):
        lengths = sorted(set(group.length))
        if len(lengths) > 1:
            raise UserError(
                f"{benchmark}: answers of {', '.join(map(str, lengths))} positions cannot be compared; "
                "valid: one length, with --where 'benchmark.generation.max_new_tokens=...', or a store for each"
            )
        for steps in sorted(set(group.steps), reverse=True):
            members = group[group.steps == steps]
            panel = panel_of(benchmark, [*members.result])
            if FLOOR not in set(panel.points.curve):
                raise UserError(
                    f"no rows of method={FLOOR} on {benchmark} in {steps} steps to compare; valid: a store of `{RUN} "
                    "+experiment=diffusion`"
                )
            # The rows of the panel; the last of equal cells is the newest.
            costs = {
                (row.curve, row.ratio): (row.prefill_flops, row.token_ms * lengths[0])
                for row in members[members.n_samples == panel.n_samples].itertuples()
            }
            panels.setdefault(benchmark, []).append(StepPanel(steps, lengths[0], panel, costs))
    return panels


def cost_frame(step_panels: Sequence[StepPanel], curve: str) -> pd.DataFrame:
    """Return the points of the unpruned model and of a curve, with the costs of an answer: FLOPs and milliseconds."""
    lines = []
    for step_panel in step_panels:
        panel, costs = step_panel.panel, step_panel.costs
        followed = panel.points[(panel.points.curve == curve) & (panel.points.ratio > 0)]
        points = [] if panel.full is None else [(FULL, 0.0, panel.full, "")]
        points += followed[["curve", "ratio", "score", "mark"]].itertuples(index=False, name=None)
        lines += [
            (panel.metric, panel.n_samples, step_panel.steps, *point, *costs[point[:2]])
            for point in points
            if point[:2] in costs
        ]
    columns = ("metric", "n_samples", "steps", "curve", "ratio", "score", "mark", "flops", "ms")
    return pd.DataFrame(lines, columns=columns)


def draw_steps(frames: Mapping[str, pd.DataFrame], name: str) -> Figure:
    """Return the figure of a method: a plot for each benchmark, a row for each number of steps and share kept.

    Args:
        frames: as of `cost_frame`, by benchmark.
        name: of the method.
    """
    cells = pd.concat(frames.values())
    pairs = sorted({(-steps, ratio) for steps, ratio in zip(cells.steps, cells.ratio, strict=True)})
    rows: dict[tuple[int, float | None], str] = {}
    for steps, ratio in pairs:
        rows.setdefault((-steps, None), f"{-steps} steps")
        rows[-steps, ratio] = share(ratio)
    places = {key: float(place) for place, key in enumerate(rows)}
    faces = {"every token": (GREYS[0], "white", True), name: (COLOURS[0], COLOURS[0], False)}
    plots = [
        Plot(
            "dots",
            title,
            [
                Series(
                    label,
                    [
                        percent_spot(
                            places[cell.steps, cell.ratio],
                            cell.score,
                            f"{cell.flops / 1e9:.1f}",
                        )
                        for cell in frame[(frame.ratio == 0) == is_full].itertuples()
                    ],
                    marker("o", color=colour, markerfacecolor=face, zorder=4),
                    key=True,
                )
                for label, (colour, face, is_full) in faces.items()
            ],
            note=f"{readable(frame.metric.iloc[0])}, {frame.n_samples.iloc[0]} samples",
            values="score (%)",
            ticks=dict(zip(places.values(), rows.values(), strict=True)),
            heads=frozenset(places[key] for key in rows if key[1] is None),
        )
        for title, frame in frames.items()
    ]
    foot = "Left: visual tokens kept. Bars: 95 % intervals. Right: GFLOP of an answer, decoder and head."
    return draw(plots, "Merge tokens, or take fewer steps?", foot, shared=True)


def read_page(store: Path, model: str | None, where: Sequence[str]) -> CurvesPage:
    """Return the page of a store's denoised answers; Raises as `read_step_panels`."""
    by_benchmark = read_step_panels(store, model, where)
    panels = [panel for step_panels in by_benchmark.values() for panel in step_panels]
    curves = {curve for panel in panels for curve in panel.panel.points.curve}
    names = config_names(methods_of(curves))
    frames = {name: cost_frame(group, FOLLOWED) for name, group in by_benchmark.items()}
    costs = []
    for name, group in by_benchmark.items():
        ratios = {0.0, *(ratio for panel in group for ratio in panel.panel.ratios)}
        heads = {ratio: share(ratio) for ratio in sorted(ratios)}
        costs.append((name, grid_table(frames[name], "steps", "ratio", heads, _cost, "r")))
    gains = [
        gains_over(
            panel.panel,
            FLOOR,
            names,
            lambda points: title_of(points.curve.iloc[0], names),
            "with every token",
            f"{panel.panel.benchmark}, {panel.steps} steps",
            f", answers of {panel.length} places",
        )
        for panel in panels
    ]
    drawn = {name: frame for name, frame in frames.items() if len(frame)}
    return CurvesPage(
        {"followed": FOLLOWED, "costs": costs, "gains": gains},
        {"merging": draw_steps(drawn, FOLLOWED)} if drawn else {},
        {},
        marked=any(FOOTNOTE in panel.panel.notes for panel in panels),
    )


def _cost(cell: Any) -> str:
    return f"{cell.score.percent}{cell.mark}; {cell.flops / 1e9:.2f}; {cell.ms:.0f}"


REPORT = Report(
    "diffusion_report",
    "Denoised answers",
    "diffusion",
    {"merging": "Score by denoising steps and share kept, with the FLOPs of an answer."},
    "denoisers.md",
    __doc__,
    read_page,
    {},
)
main = REPORT.main

if __name__ == "__main__":
    sys.exit(main())
