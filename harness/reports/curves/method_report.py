"""A table and a figure for each benchmark, comparing every method with random dropping: output of `report=`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from espalier.harness.reports.curves import curve_table, report_page
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_files import file_name
from espalier.harness.reports.curves.curve_points import CurvePanel
from espalier.harness.reports.curves.figures import save
from espalier.harness.reports.curves.gain_dots import draw_gains
from espalier.harness.reports.curves.report_page import config_names, name_and_share, write_text
from espalier.harness.specs.commands import RUN
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.row_text import FOOTNOTE

INTRO, EARLIER, OVERVIEW = report_page.texts("reducers")

#: Benchmark, name, share kept and reason of each cell without a result.
Gaps = Sequence[tuple[str, ...]]


def write_report(
    spec: RunSpec, run_keys: Collection[str], left_out: Sequence[tuple[RunSpec, str]] = ()
) -> Iterator[Path]:
    """Write `<benchmark>.md` and `.svg` into `spec.report` for each benchmark, and an overview in `README.md`.

    `spec` is one of the runs. Those of `run_keys` are shown; those of `left_out` could not run, each with the reason.

    Raises:
        UserError: the store lacks the runs, or random dropping is not among them.
    """
    assert spec.report is not None  # checked by the caller
    folder, rule, model = spec.report, spec.budget.rule, spec.model.name
    panels = read_panels(spec.store, (), model, rule, run_keys, nearest=True)
    methods = {curve.name.split()[0] for panel in panels for curve in panel.curves}
    names = config_names(methods, spec.budget)
    gaps = [(gap.benchmark.name, *name_and_share(gap), reason) for gap, reason in left_out]
    folder.mkdir(parents=True, exist_ok=True)
    for panel in panels:
        path = folder / file_name(panel.benchmark)
        yield write_text(folder / f"{path.name}.md", page(panel, model, names, gaps))
        yield from save(draw_gains(panel, panel.groups(), names), path, ("svg",))
    yield write_text(folder / "README.md", overview(panels, model, names))


def page(panel: CurvePanel, model: str, names: Mapping[str, str], gaps: Gaps) -> list[str]:
    """Return one benchmark's page: the figure, one table for each site, and the omitted cells."""
    words = {"benchmark": panel.benchmark, "file": file_name(panel.benchmark), "model": model}
    full = panel.full_text("with all of them")
    parts = [INTRO.format(metric=panel.metric, n=panel.n_samples, full=full, **words)]
    for group in panel.groups():
        parts.append(f"## {group.title[0].upper()}{group.title[1:]}\n")
        if group.floor.layer:
            parts.append(EARLIER.format(layer=group.floor.layer))
        parts.append(curve_table.gains(panel, group, names))
    parts += curve_table.note_paragraphs(panel)
    lines = [line for benchmark, *line in gaps if benchmark == panel.benchmark]
    if lines:
        table = curve_table.markdown_table(["method", "kept", "reason"], lines, "lrl")
        parts += ["## Left out\n", table]
    return parts


def overview(panels: Sequence[CurvePanel], model: str, names: Mapping[str, str]) -> list[str]:
    """Return one table over all benchmarks: for each ratio, whether a method is above or below random dropping."""
    shares = ", ".join(map(panels[0].heading, panels[0].ratios))
    parts = [OVERVIEW.format(model=model, run=RUN, shares=shares)]
    if any(FOOTNOTE in panel.notes for panel in panels):
        parts.append(f"{FOOTNOTE}.\n")
    pages = [f"[{panel.benchmark}]({file_name(panel.benchmark)}.md)" for panel in panels]
    groups = panels[0].groups()
    return [*parts, *(curve_table.sign_table(panels, group, pages, names) for group in groups)]
