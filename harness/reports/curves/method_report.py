"""A table and a figure for each benchmark, comparing every method with random dropping: output of `report=`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from espalier.harness.errors import plain_page
from espalier.harness.kinds.method_stack import label_of
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_points import CurvePanel, share
from espalier.harness.reports.curves.curve_table import gains, markdown_table, note_paragraphs
from espalier.harness.reports.curves.figures import save
from espalier.harness.reports.curves.gain_dots import draw_gains
from espalier.harness.reports.curves.report_page import config_names, texts
from espalier.harness.specs.commands import RUN
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.unparsed_mark import FOOTNOTE

INTRO, EARLIER, OVERVIEW = texts("reducers")

#: Name, benchmark, share kept and reason of a cell without a result.
Gap = tuple[str, str, str, str]


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
        path = folder / file_name(panel.benchmark)
        picture = save(draw_gains(panel, panel.groups(), names), path, ("svg",))
        table = folder / f"{path.name}.md"
        table.write_text(plain_page(page(panel, model, names, gaps)), encoding="utf-8")
        yield from (table, *picture)
    index = folder / "README.md"
    index.write_text(plain_page(overview(panels, model, names)), encoding="utf-8")
    yield index


def file_name(benchmark: str) -> str:
    """Return a benchmark's name as a file name: a link to `task:pope.md` would be read as the scheme `task`."""
    return benchmark.replace(":", "_").replace("/", "_")


def page(panel: CurvePanel, model: str, names: Mapping[str, str], gaps: Sequence[Gap]) -> str:
    """Return one benchmark's page: the figure, one table for each site, and the omitted cells."""
    words = {"benchmark": panel.benchmark, "file": file_name(panel.benchmark), "model": model}
    full = panel.full_text("with all of them")
    parts = [INTRO.format(metric=panel.metric, n=panel.n_samples, full=full, **words)]
    for group in panel.groups():
        parts.append(f"## {group.title[0].upper()}{group.title[1:]}\n")
        if group.floor.layer:
            parts.append(EARLIER.format(layer=group.floor.layer))
        parts.append(gains(panel, group, names))
    parts += note_paragraphs(panel)
    lines = [
        (name, kept, why) for name, benchmark, kept, why in gaps if benchmark == panel.benchmark
    ]
    if lines:
        parts += ["## Left out\n", markdown_table(["method", "kept", "reason"], lines, "lrl")]
    return "\n".join(parts)


def overview(panels: Sequence[CurvePanel], model: str, names: Mapping[str, str]) -> str:
    """Return one table over all benchmarks: for each ratio, whether a method is above or below random dropping."""
    shares = ", ".join(map(panels[0].heading, panels[0].ratios))
    parts = [OVERVIEW.format(model=model, run=RUN, shares=shares)]
    if any(FOOTNOTE in panel.notes for panel in panels):
        parts.append(f"{FOOTNOTE}.\n")
    pages = [f"[{panel.benchmark}]({file_name(panel.benchmark)}.md)" for panel in panels]
    for group in panels[0].groups():
        lines = [
            [curve.title(names), *(_signs(panel, curve.name) for panel in panels)]
            for curve in group.curves
        ]
        lines.sort(key=_rank)
        parts.append(markdown_table([group.title, *pages], lines, "l"))
    return "\n".join(parts)


def _signs(panel: CurvePanel, name: str) -> str:
    curve = next((curve for curve in panel.curves if curve.name == name), None)
    if curve is None:
        return ""
    signs = {"above": "+", "below": "-", "": "."}
    points = map(curve.at, panel.ratios)
    return f"`{''.join(signs[point.verdict] + point.mark if point else ' ' for point in points)}`"


def _rank(line: Sequence[str]) -> tuple[int, str]:
    title, *cells = line
    signs = "".join(cells)
    return signs.count("-") - signs.count("+"), title


def _gap(spec: RunSpec, reason: str) -> Gap:
    names = config_names({spec.method.name}, spec.budget)
    name = f"{spec.method.title} {label_of(spec)}".strip()
    kept = share(spec.budget.ratio) if spec.budget.count is None else spec.budget.amount
    return names.get(name, name), spec.benchmark.name, kept, reason
