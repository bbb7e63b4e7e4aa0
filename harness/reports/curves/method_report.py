"""A table and a figure for each benchmark, comparing every method with random dropping: output of `report=`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from espalier.harness.reports.curves import curve_table
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_files import file_name
from espalier.harness.reports.curves.curve_points import (
    BaselineGroup,
    CurvePanel,
    methods_of,
    title_of,
    verdict,
)
from espalier.harness.reports.curves.figures import (
    COLOURS,
    DASHED,
    Plot,
    Series,
    Spot,
    draw,
    marker,
    save,
)
from espalier.harness.reports.curves.report_page import config_names, name_and_share, write_page
from espalier.harness.reports.printed_text import markdown_table, readable
from espalier.harness.specs.commands import RUN
from espalier.harness.specs.run_spec import RunSpec
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
        _, *titles = group.names(names).values()
        rows |= dict(enumerate((group.title, *titles), len(rows)))
    plots = [
        Plot(
            "dots",
            f"{heading} kept",
            [
                series
                for start, group in zip(starts, groups, strict=True)
                for series in _series(panel, group, ratio, start, names)
            ],
            ticks=rows,
            heads=frozenset(starts),
        )
        for ratio, heading in panel.headings.items()
    ]
    title = f"{panel.benchmark}: {readable(panel.metric)}, {panel.n_samples} samples"
    foot = FOOT + (f"\n{FOOTNOTE}" if FOOTNOTE in panel.notes else "")
    return draw(plots, title, foot, columns=len(plots), shared=True)


def _series(
    panel: CurvePanel, group: BaselineGroup, ratio: float, start: int, names: Mapping[str, str]
) -> Iterator[Series]:
    """Yield the dots of a group at a ratio, its random dropping as a line at 0, the unpruned model as a dashed line."""
    baseline, *curves = dict.fromkeys(group.points.curve)
    at_ratio = group.points[group.points.ratio == ratio]
    points = {point.curve: point for point in at_ratio.itertuples()}
    end = start + len(curves) + 0.5
    zero = {"color": "#8A8A8A", "linewidth": 1.0, "zorder": 1}
    floor = points.get(baseline)
    text = "" if floor is None else f"{title_of(baseline, names)}: {_score(floor)}"
    yield Series("random", [Spot(start, 0.0, text=text), Spot(end, 0.0)], zero)
    if floor is not None and panel.full is not None:
        full = 100 * (panel.full.value - floor.score.value)
        yield Series("unpruned", [Spot(start + 0.5, full), Spot(end, full)], DASHED, key=True)
    for row, curve in enumerate(curves, start + 1):
        point = points.get(curve)
        if point is None or point.gain is None:
            yield Series("", [Spot(row, None, text="-" if point is None else _score(point))], {})
            continue
        name, colour, face = DOTS[verdict(point.gain)]
        gain = point.gain
        spot = Spot(row, 100 * gain.value, 100 * gain.low, 100 * gain.high, _score(point))
        look = marker("s" if point.control else "o", color=colour, markerfacecolor=face, zorder=4)
        yield Series(name + ", control" * point.control, [spot], look, key=True)


def _score(point: Any) -> str:
    return f"{100 * point.score.value:.1f}{point.mark}"


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
    curves = {curve for panel in panels for curve in panel.points.curve}
    names = config_names(methods_of(curves), spec.budget)
    gaps = [(gap.benchmark.name, *name_and_share(gap), reason) for gap, reason in left_out]
    folder.mkdir(parents=True, exist_ok=True)
    for panel in panels:
        file, groups = file_name(panel.benchmark), panel.groups()
        lines = [line for benchmark, *line in gaps if benchmark == panel.benchmark]
        yield write_page(
            folder / f"{file}.md",
            "reducers.md",
            **{"benchmark": panel.benchmark, "file": file, "model": model, "metric": panel.metric},
            n=panel.n_samples,
            full=panel.full_text("with all of them"),
            groups=[
                (
                    f"{group.title[0].upper()}{group.title[1:]}",
                    group.layer,
                    curve_table.gains(panel, group, names),
                )
                for group in groups
            ],
            notes=curve_table.note_paragraphs(panel),
            gaps=lines and markdown_table(["method", "kept", "reason"], lines, "lrl"),
        )
        yield from save(draw_gains(panel, groups, names), folder / file, ("svg",))
    # A table over all benchmarks: for each ratio, whether a method is above or below random dropping.
    pages = [f"[{panel.benchmark}]({file_name(panel.benchmark)}.md)" for panel in panels]
    yield write_page(
        folder / "README.md",
        "overview.md",
        **{"model": model, "run": RUN},
        shares=", ".join(panels[0].headings.values()),
        marked=any(FOOTNOTE in panel.notes for panel in panels),
        tables=[
            curve_table.sign_table(panels, group, pages, names) for group in panels[0].groups()
        ],
    )
