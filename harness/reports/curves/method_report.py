"""A table and a figure for each benchmark, comparing every method with random dropping: output of `report=`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from omegaconf import OmegaConf

from espalier.harness.config.method_names import method_section, setting_names
from espalier.harness.config.resolvers import register
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError, plain_page
from espalier.harness.kinds.method_stack import label_of
from espalier.harness.reports.curves.curve_points import (
    FLOOR,
    Curve,
    CurvePanel,
    CurvePoint,
    read_panels,
    share,
)
from espalier.harness.reports.curves.curve_table import mark, note_paragraphs
from espalier.harness.reports.curves.dot_plot import draw_dots
from espalier.harness.reports.curves.plot_style import STYLE
from espalier.harness.reports.curves.random_baselines import (
    BaselineGroup,
    at,
    title,
    title_of,
    verdict,
)
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.commands import RUN
from espalier.harness.specs.labels import label
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.unparsed_mark import FOOTNOTE

INTRO = """\
# {benchmark}: every method against random tokens

{metric} in percent on {n} samples of `{model}`, by share of visual tokens kept{full}. Written by
`python run.py +experiment=sweep`; names are those of the files in `conf/method`.

![{benchmark}: every method against random tokens]({file}.svg)

A cell holds the score, the points above random dropping with the paired 95 % interval over samples, and **above** or
**below** where the interval leaves 0 out; - where the cell could not run. If no method differed from random, one
comparison in twenty would be marked all the same; a `*` says that the paired test still finds a difference when it is
corrected for all cells of the page. The picture has the points above random dropping with those paired intervals; the
dashed line is the unpruned model, and squares are controls that no paper proposes.
"""

EARLIER = """\
Methods between layers are compared with random dropping before layer {layer}; their own first layer is in brackets
where it is another. A later one lets the model read every token for longer, whatever is kept then, and a method with
several layers drops step by step.
"""


@dataclass(frozen=True)
class Gap:
    """A cell without a result: config name of the method, benchmark, what is kept, and the reason in one line."""

    name: str
    benchmark: str
    kept: str
    reason: str


def write_report(
    spec: RunSpec, run_keys: Collection[str], left_out: Sequence[tuple[RunSpec, str]] = ()
) -> Iterator[Path]:
    """Write `<benchmark>.md` and `.svg` into `spec.report` for each benchmark, and an overview in `README.md`.

    Args:
        spec: one of the runs; provides store, report folder, model and budget rule.
        run_keys: the runs shown.
        left_out: runs that could not run, each with the reason.

    Raises:
        UserError: the store lacks the runs, or random dropping is not among them.
    """
    assert spec.report is not None  # checked by the caller
    folder, rule, model = spec.report, spec.budget.rule, spec.model.name
    panels = read_panels(spec.store, (), model, rule, run_keys, nearest=True)
    methods = {curve.name.split()[0] for panel in panels for curve in panel.curves}
    names = config_names(methods, spec.budget)
    gaps = [_gap(omitted, reason) for omitted, reason in left_out]
    folder.mkdir(parents=True, exist_ok=True)
    for panel in panels:
        panel_gaps = [gap for gap in gaps if gap.benchmark == panel.benchmark]
        with rc_context(STYLE):
            figure = draw_dots(panel, groups(panel), names)
            picture = folder / f"{file_name(panel.benchmark)}.svg"
            figure.savefig(picture, metadata={"Date": None})
        table = folder / f"{file_name(panel.benchmark)}.md"
        table.write_text(plain_page(page(panel, model, names, panel_gaps)), encoding="utf-8")
        yield from (table, picture)
    index = folder / "README.md"
    index.write_text(plain_page(overview(panels, model, names)), encoding="utf-8")
    yield index


def file_name(benchmark: str) -> str:
    """Return a benchmark's name as a file name: a link to `task:pope.md` would be read as the scheme `task`."""
    return benchmark.replace(":", "_").replace("/", "_")


def config_names(methods: Collection[str], budget: Budget) -> dict[str, str]:
    """Return setting names by curve name for some methods: `fastv queries=mean` is fastv_paper."""
    register()
    stems = {}
    for setting in setting_names():
        part = OmegaConf.create(method_section(setting))
        if part.name in methods:
            # Keys that a method's config can interpolate.
            run = {"ratio": budget.ratio, "budget": {"rule": budget.rule}, "method": part}
            resolved: Any = OmegaConf.to_container(OmegaConf.create(run).method, resolve=True)
            name = _curve_name(part.name, part.variant, resolved["params"], budget)
            stems[name] = setting
    return stems


def groups(panel: CurvePanel) -> list[BaselineGroup]:
    """Return the curves grouped by the random dropping that their gains refer to; before the decoder first.

    Raises:
        UserError: there is no random dropping to compare with.
    """
    last = panel.ratios[-1]
    floors = [curve for curve in panel.curves if curve.floor is None and _is_floor(curve)]
    if not floors:
        raise UserError(f"report needs method={FLOOR} among the runs of {panel.benchmark}")
    return [
        BaselineGroup(
            floor, tuple(sorted(_curves_over(floor, panel), key=lambda curve: _rank(curve, last)))
        )
        for floor in sorted(floors, key=lambda curve: curve.layer or 0)
    ]


def page(panel: CurvePanel, model: str, names: Mapping[str, str], gaps: Sequence[Gap]) -> str:
    """Return one benchmark's page: the figure, one table for each site, and the omitted cells."""
    full = (
        ""
        if panel.full is None
        else f"; {100 * panel.full.value:.1f}{panel.full_mark} with all of them"
    )
    parts = [
        INTRO.format(
            benchmark=panel.benchmark,
            file=file_name(panel.benchmark),
            metric=panel.metric,
            n=panel.n_samples,
            model=model,
            full=full,
        )
    ]
    for group in groups(panel):
        parts.append(f"## {group.title[0].upper()}{group.title[1:]}\n")
        if group.floor.layer:
            parts.append(EARLIER.format(layer=group.floor.layer))
        parts.append(gains(panel, group, names))
    parts += note_paragraphs(panel)
    if gaps:
        parts += ["## Left out\n", _left_out(gaps)]
    return "\n".join(parts)


def overview(panels: Sequence[CurvePanel], model: str, names: Mapping[str, str]) -> str:
    """Return one table over all benchmarks: for each ratio, whether a method is above or below random dropping."""
    shares = ", ".join(map(panels[0].heading, panels[0].ratios))
    lines = [
        "# Every method against random tokens\n",
        f"`{model}`, `{RUN} +experiment=sweep`. In each cell from left to right {shares} of the visual",
        "tokens kept: `+` the paired 95 % interval of the difference to random dropping lies above 0, `-` below 0,",
        "`.` around it, a gap where the cell could not run. Scores, and what such marks do not tell, are on each",
        "benchmark's page.\n",
    ]
    pages = " | ".join(f"[{panel.benchmark}]({file_name(panel.benchmark)}.md)" for panel in panels)
    if any(FOOTNOTE in panel.notes for panel in panels):
        lines.append(f"{FOOTNOTE}.\n")
    for group in groups(panels[0]):
        lines += [f"| {group.title} | {pages} |", "| --- |" + " --- |" * len(panels)]
        marks = {
            curve.name: [_marks(panel, curve.name) for panel in panels] for curve in group.curves
        }
        order = sorted(marks, key=lambda name: (_balance(marks[name]), title(name, names)))
        lines += [f"| {title(name, names)} | {' | '.join(marks[name])} |" for name in order]
        lines.append("")
    return "\n".join(lines)


def gains(panel: CurvePanel, group: BaselineGroup, names: Mapping[str, str]) -> str:
    """Return a table of scores by ratio with gains over random dropping; random dropping is the first line."""
    lines = [
        "| method | " + " | ".join(map(panel.heading, panel.ratios)) + " |",
        "| --- |" + " ---: |" * len(panel.ratios),
    ]
    for curve in (group.floor, *group.curves):
        cells = [_cell(at(curve, ratio)) for ratio in panel.ratios]
        where = f" (layer {curve.layer})" if curve.layer != group.floor.layer else ""
        lines.append(f"| {title_of(curve, names)}{where} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(point: CurvePoint | None) -> str:
    if point is None:
        return "-"
    if point.gain is None:
        return point.score.percent + point.mark
    sign = verdict(point)
    note = f" **{sign}**{mark(point.corrected_pvalue)}" if sign else ""
    return f"{100 * point.score.value:.1f}{point.mark}, {point.gain.points}{note}"


def _left_out(gaps: Sequence[Gap]) -> str:
    lines = ["| method | kept | reason |", "| --- | ---: | --- |"]
    lines += [f"| {gap.name} | {gap.kept} | {gap.reason} |" for gap in gaps]
    return "\n".join(lines) + "\n"


def _marks(panel: CurvePanel, name: str) -> str:
    curve = next((point for point in panel.curves if point.name == name), None)
    if curve is None:
        return ""
    signs = {"above": "+", "below": "-", "": "."}
    points = [at(curve, ratio) for ratio in panel.ratios]
    return (
        "`"
        + "".join(" " if point is None else signs[verdict(point)] + point.mark for point in points)
        + "`"
    )


def _balance(marks: Sequence[str]) -> int:
    text = "".join(marks)
    return text.count("-") - text.count("+")


def _gap(spec: RunSpec, reason: str) -> Gap:
    method = spec.method
    names = config_names({method.name}, spec.budget)
    name = f"{method.title} {label_of(spec)}".strip()
    kept = share(spec.budget.ratio) if spec.budget.count is None else spec.budget.amount
    return Gap(names.get(name, name), spec.benchmark.name, kept, reason)


def _curve_name(method: str, variant: str, params: Mapping[str, Any], budget: Budget) -> str:
    return f"{method} {label(build_method(method, params), variant, budget)}".strip()


def _is_floor(curve: Curve) -> bool:
    return curve.name.split()[0] == FLOOR


def _curves_over(floor: Curve, panel: CurvePanel) -> Iterator[Curve]:
    return (curve for curve in panel.curves if curve.floor == floor.name)


def _rank(curve: Curve, ratio: float) -> tuple[float, str]:
    point = at(curve, ratio)
    return (1.0 if point is None else -point.score.value, curve.name)
