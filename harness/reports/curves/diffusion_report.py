"""Tables and a figure of denoised answers.

`python -m espalier.harness.reports.curves.diffusion_report --store results --write lab/measured/diffusion`
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from espalier.harness.cost.budget import Budget
from espalier.harness.reports.curves.curve_points import FLOOR, Curve, share
from espalier.harness.reports.curves.curve_table import gains_over, grid_table
from espalier.harness.reports.curves.report_page import Page, Part, Report, config_names, texts
from espalier.harness.reports.curves.step_panels import (
    StepPanel,
    cost_frame,
    draw_steps,
    read_step_panels,
)
from espalier.harness.store.row_text import FOOTNOTE

#: The method shown at every number of steps.
FOLLOWED = "d3tom paper"

INTRO, COSTS, GAINS = texts("denoisers", followed=FOLLOWED)


def read_page(store: Path, model: str | None, where: Sequence[str]) -> Page:
    """Return the page of a store's denoised answers; Raises as `read_step_panels`."""
    by_benchmark = read_step_panels(store, model, where)
    panels = [panel for step_panels in by_benchmark.values() for panel in step_panels]
    curves = {curve.name.split()[0] for panel in panels for curve in panel.panel.curves}
    names = config_names(curves, Budget("kept", 0.0))
    frames = {name: cost_frame(group, FOLLOWED) for name, group in by_benchmark.items()}
    frames = {name: frame for name, frame in frames.items() if len(frame)}
    parts = [
        Part(by_benchmark, COSTS, _costs(by_benchmark)),
        Part(frames, figures={"merging": partial(draw_steps, name=FOLLOWED)}),
        Part(panels, GAINS, _gains(panels, names)),
    ]
    is_marked = any(FOOTNOTE in panel.panel.notes for panel in panels)
    return Page(INTRO, parts, is_marked=is_marked)


def _costs(by_benchmark: Mapping[str, Sequence[StepPanel]]) -> Iterable[str]:
    """Yield score and cost of the followed method: a line for each number of steps, a column for each share."""
    for benchmark, group in by_benchmark.items():
        ratios = sorted({0.0, *(ratio for panel in group for ratio in panel.panel.ratios)})
        heads = {ratio: share(ratio) for ratio in ratios}
        table = grid_table(cost_frame(group, FOLLOWED), "steps", "ratio", heads, _cost, "r")
        yield f"### {benchmark}\n\n{table}"


def _cost(cell: Any) -> str:
    return f"{cell.point.score.percent}{cell.point.mark}; {cell.flops / 1e9:.2f}; {cell.ms:.0f}"


def _gains(panels: Sequence[StepPanel], names: Mapping[str, str]) -> Iterable[str]:
    """Yield the scores of one benchmark at one number of steps, random tokens first."""

    def by_title(curve: Curve) -> str:
        return curve.title(names)

    for panel in panels:
        title = f"{panel.panel.benchmark}, {panel.steps} steps"
        setting = f", answers of {panel.length} places"
        full = "with every token"
        yield gains_over(panel.panel, FLOOR, names, by_title, full, title, setting)


REPORT = Report("diffusion_report", __doc__, read_page, {})
main = REPORT.main

if __name__ == "__main__":
    sys.exit(main())
