"""Tables and a figure of denoised answers.

`python -m espalier.harness.reports.curves.diffusion_report --store results --write lab/measured/diffusion`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context

from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError, plain_page
from espalier.harness.reports.curves.curve_files import RESOLUTION
from espalier.harness.reports.curves.curve_points import FLOOR
from espalier.harness.reports.curves.diffusion_picture import draw
from espalier.harness.reports.curves.diffusion_rows import (
    CostPoint,
    StepPanel,
    cost_points,
    read_step_panels,
    unpruned_point,
)
from espalier.harness.reports.curves.method_report import config_names, gains
from espalier.harness.reports.curves.plot_style import STYLE
from espalier.harness.reports.curves.random_baselines import BaselineGroup, title
from espalier.harness.reports.curves.stored_rows import WHERE
from espalier.harness.specs.commands import command
from espalier.harness.store.files.folder_checks import check_folder, existing_store
from espalier.harness.store.unparsed_mark import FOOTNOTE

#: The method shown at every number of steps.
FOLLOWED = "d3tom"

INTRO = """\
# Denoised answers, measured

Written by `python -m espalier.harness.reports.curves.diffusion_report` from the rows of `python run.py
+experiment=diffusion`;
[docs/diffusion.md](../diffusion.md) says what the methods do. Shares are of visual tokens behind a method's layer: at
the steps behind the first for methods that merge at each step, whose first step runs whole, at every step for the
others.

![Score by time, by FLOPs and by steps](merging.png)

Lines along time and FLOPs go from the whole model to the smallest share at the most steps; of `{followed}` there is one
for each number of steps, and of the whole model one over its numbers of steps. To the right the smallest share alone.
Bars are 95 % intervals.
"""

TABLES = """\
## Methods by share kept

A cell holds the score in percent, the points above random tokens with the paired 95 % bootstrap interval over samples,
and **above** or **below** where the interval leaves 0 out; random tokens, and methods between layers, which have no
random ones beside them, with their own interval. If no method differed from random, one comparison in twenty would be
marked all the same; a `*` says that the paired test still finds a difference when it is corrected for all cells.
"""

BOUGHT = """\
## Merging or fewer steps

Of `{followed}`: score in percent with its 95 % interval, then GFLOP and milliseconds an answer, decoder and head of all
steps. FLOPs leave out what scoring and merging compute; milliseconds are medians over samples in batches, on the
machine that ran it.
"""


def write_diffusion(
    store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
) -> list[Path]:
    """Write `README.md` and a figure (`merging`, .png and .svg) into `folder`, and return their paths.

    Args:
        store: root of the run store.
        folder: created if needed.
        model: required if the store has several.
        where: `key=value` conditions on settings (harness/reports/curves/stored_rows.py).

    Raises:
        UserError: the store has no denoised answers, or of several models and `model` is None, results differ in a
            setting that must be the same, or there is no result of random tokens.
    """
    panels_by_benchmark = read_step_panels(store, model, where)
    all_panels = [panel for step_panels in panels_by_benchmark.values() for panel in step_panels]
    curves = {curve.name for step_panel in all_panels for curve in step_panel.panel.curves}
    names = config_names({curve.split()[0] for curve in curves}, Budget("kept", 0.0))
    folder.mkdir(parents=True, exist_ok=True)
    png, svg, page = folder / "merging.png", folder / "merging.svg", folder / "README.md"
    with rc_context(STYLE):
        figure = draw(panels_by_benchmark, names, FOLLOWED)
        figure.savefig(png, dpi=RESOLUTION)
        # No date, and a fixed salt in the style: equal data gives equal bytes.
        figure.savefig(svg, metadata={"Date": None})
    parts = [INTRO.format(followed=FOLLOWED), BOUGHT.format(followed=FOLLOWED)]
    parts += [
        _cost_table(benchmark, step_panels)
        for benchmark, step_panels in panels_by_benchmark.items()
    ]
    parts.append(TABLES)
    parts += [
        _table(step_panel, names)
        for step_panels in panels_by_benchmark.values()
        for step_panel in step_panels
    ]
    if any(FOOTNOTE in step_panel.panel.notes for step_panel in all_panels):
        parts.append(f"{FOOTNOTE}.\n")
    page.write_text(plain_page("\n".join(parts)), encoding="utf-8")
    return [png, svg, page]


def _table(step_panel: StepPanel, names: dict[str, str]) -> str:
    """Return the scores of one benchmark at one number of steps, random tokens first."""
    panel = step_panel.panel
    floor = next((curve for curve in panel.curves if curve.name == FLOOR), None)
    if floor is None:
        raise UserError(
            f"no rows of method={FLOOR} on {panel.benchmark} in {step_panel.steps} steps to compare; valid: a store "
            "of `python run.py +experiment=diffusion`"
        )
    curves = sorted(
        (curve for curve in panel.curves if curve is not floor),
        key=lambda curve: title(curve.name, names),
    )
    full = (
        ""
        if panel.full is None
        else f"; {100 * panel.full.value:.1f}{panel.full_mark} with every token"
    )
    return (
        f"### {panel.benchmark}, {step_panel.steps} steps\n\n{panel.metric} on {panel.n_samples} samples, answers of "
        f"{step_panel.length} places{full}.\n\n{gains(panel, BaselineGroup(floor, tuple(curves)), names)}"
    )


def _cost_table(benchmark: str, step_panels: Sequence[StepPanel]) -> str:
    """Return score and cost of the followed method: a line for each number of steps, a column for each share."""
    ratios = sorted(
        {0.0, *(ratio for step_panel in step_panels for ratio in step_panel.panel.ratios)}
    )
    lines = [
        f"### {benchmark}\n",
        f"| steps | {' | '.join(f'{100 * (1 - ratio):.4g} %' for ratio in ratios)} |",
        "| ---: |" + " ---: |" * len(ratios),
    ]
    for step_panel in step_panels:
        start = unpruned_point(step_panel)
        cells = {} if start is None else {0.0: _cost(start)}
        if any(curve.name == FOLLOWED for curve in step_panel.panel.curves):
            cells |= {
                point.ratio: _cost(point)
                for point in cost_points(step_panel, FOLLOWED)
                if point.ratio
            }
        lines.append(
            f"| {step_panel.steps} | {' | '.join(cells.get(ratio, '-') for ratio in ratios)} |"
        )
    return "\n".join(lines) + "\n"


def _cost(point: CostPoint) -> str:
    return f"{point.point.score.percent}{point.point.mark}; {point.cost.flops / 1e9:.2f}; {point.cost.ms:.0f}"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write tables and a figure of a store's denoised answers; exit code 2 and one line if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m espalier.harness.reports.curves.diffusion_report", description=__doc__
    )
    parser.add_argument("--store", type=Path, default=Path("results"), help="the run store")
    parser.add_argument("--write", type=Path, required=True, help="folder of tables and picture")
    parser.add_argument("--model", help="which model, if the store has several")
    parser.add_argument("--where", action="append", default=[], help=WHERE)
    options = parser.parse_args(argv)
    try:
        check_folder("--write", options.write)
        paths = write_diffusion(
            existing_store(options.store), options.write, options.model, options.where
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
