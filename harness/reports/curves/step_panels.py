"""The results of denoised answers to compare, by benchmark, number of steps and method, with costs and their figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_points import FLOOR, FULL, CurvePanel, CurvePoint, share
from espalier.harness.reports.curves.figures import Plot, Series, draw, marker, percent_spot
from espalier.harness.reports.curves.plot_style import COLOURS, GREYS
from espalier.harness.reports.curves.printed_names import readable
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
    newest_per_cell,
    read_results,
    results_of,
    tidy,
)
from espalier.harness.specs.commands import RUN


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

    def is_denoised(result: StoredResult) -> bool:
        return result.row["budget_rule"] == "kept" and bool(result.row["extra"].get("diffusion"))

    results = results_of(
        read_results(store), is_denoised, "a model that denoises", store, "diffusion", model, where
    )
    frame = tidy(results, length="extra.diffusion.length", steps="extra.diffusion.steps")
    frame["length"], frame["steps"] = frame.length.map(round), frame.steps.map(round)
    panels: dict[str, list[StepPanel]] = {}
    for benchmark, group in frame.groupby("benchmark"):
        if group.length.nunique() > 1:
            lengths = ", ".join(map(str, sorted(set(group.length))))
            raise UserError(
                f"{benchmark}: answers of {lengths} positions cannot be compared; "
                "valid: one length, with --where 'benchmark.generation.max_new_tokens=...', or a store for each"
            )
        for steps in sorted(set(group.steps), reverse=True):
            members = group[group.steps == steps]
            panel = _step_panel(store, steps, members.length.iloc[0], [*members.result])
            panels.setdefault(benchmark, []).append(panel)
    return panels


def _step_panel(store: Path, steps: int, length: int, results: Sequence[StoredResult]) -> StepPanel:
    first = results[0].row
    keys = {result.row["run_key"] for result in results}
    (panel,) = read_panels(store, [first["benchmark"]], first["model"], "kept", keys)
    if FLOOR not in {curve.name for curve in panel.curves}:
        raise UserError(
            f"no rows of method={FLOOR} on {panel.benchmark} in {steps} steps to compare; valid: a store of `{RUN} "
            "+experiment=diffusion`"
        )
    used = [result for result in results if result.row["n_samples"] == panel.n_samples]
    frame = tidy(newest_per_cell(used), length="extra.diffusion.length")
    costs = {
        (row.curve, row.ratio): (row.prefill_flops, row.token_ms * row.length)
        for row in frame.itertuples()
    }
    return StepPanel(steps, length, panel, costs)


def cost_frame(step_panels: Sequence[StepPanel], curve: str) -> pd.DataFrame:
    """Return the points of the unpruned model and of a curve, with the costs of an answer: FLOPs and milliseconds."""
    lines = []
    for step_panel in step_panels:
        panel, costs = step_panel.panel, step_panel.costs
        points = [] if panel.full is None else [(FULL, CurvePoint(0.0, panel.full))]
        points += [
            (curve, point)
            for shown in panel.curves
            for point in shown.points
            if shown.name == curve and point.ratio
        ]
        lines += [
            (panel.metric, panel.n_samples, step_panel.steps, point, *costs[name, point.ratio])
            for name, point in points
            if (name, point.ratio) in costs
        ]
    frame = pd.DataFrame(lines, columns=["metric", "n_samples", "steps", "point", "flops", "ms"])
    return frame.assign(ratio=[point.ratio for point in frame.point])


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
                            cell.point.score,
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
