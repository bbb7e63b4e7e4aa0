"""Tables in Markdown: of any rows, and of curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from espalier.harness.reports.curves.comparison import averages
from espalier.harness.reports.curves.curve_points import (
    BaselineGroup,
    Curve,
    CurvePanel,
    CurvePoint,
    share,
)
from espalier.harness.stats import Interval

#: Corrected p-values below this are marked; one table in twenty has a mark by chance.
LEVEL = 0.05


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Return a table with a heading for each column; `align` has l or r for each, the last one for all further."""
    sides = align.ljust(len(heads), align[-1])
    rule = ["---:" if side == "r" else "---" for side in sides[: len(heads)]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *lines))


def markdown(panels: Sequence[CurvePanel]) -> str:
    """Return tables of scores, of retention and of gains over random for each benchmark, then means over all."""
    return "\n".join([*(_benchmark(panel) for panel in panels), *over_all(panels)])


def over_all(panels: Sequence[CurvePanel]) -> list[str]:
    """Return a table of mean retention over several benchmarks, for curves and ratios that all of them have."""
    retentions = averages(panels)
    if len(panels) < 2 or not retentions:
        return []
    ratios = {point.amount: point.ratio for curve in panels[0].curves for point in curve.points}
    amounts = sorted({amount for _, amount in retentions}, key=lambda amount: ratios[amount])
    headings = [share(amount) if isinstance(amount, float) else amount for amount in amounts]
    marks = {
        (curve.name, point.amount): point.mark
        for panel in panels
        for curve in panel.curves
        for point in curve.points
        if point.unread
    }
    lines = [
        [name, *(_interval(retentions.get(key)) + marks.get(key, "") for key in keys)]
        for name in dict.fromkeys(name for name, _ in retentions)
        if (keys := [(name, amount) for amount in amounts])
    ]
    return [
        f"### Mean retention over {len(panels)} benchmarks\n\n"
        "In percent of the unpruned score, each benchmark weighed alike, its samples resampled within it.\n\n"
        + markdown_table(["method", *headings], lines)
    ]


def mark(pvalue: float | None) -> str:
    """Return a star for a corrected p-value below 0.05."""
    return "*" if pvalue is not None and pvalue < LEVEL else ""


def note_paragraphs(panel: CurvePanel) -> list[str]:
    """Return the panel's notes as paragraphs."""
    return [f"{note[0].upper()}{note[1:]}.\n" for note in panel.notes]


def gains(panel: CurvePanel, group: BaselineGroup, names: Mapping[str, str]) -> str:
    """Return a table of scores by ratio with gains over random dropping; random dropping is the first line."""
    lines = [
        [group.name(curve, names), *map(_gained, map(curve.at, panel.ratios))]
        for curve in (group.floor, *group.curves)
    ]
    return markdown_table(["method", *map(panel.heading, panel.ratios)], lines)


def _gained(point: CurvePoint | None) -> str:
    if point is None:
        return "-"
    if point.gain is None:
        return point.score.percent + point.mark
    note = f" **{point.verdict}**{mark(point.corrected_pvalue)}" if point.verdict else ""
    return f"{100 * point.score.value:.1f}{point.mark}, {point.gain.points}{note}"


def _benchmark(panel: CurvePanel) -> str:
    parts = [
        f"### {panel.benchmark}: {panel.metric}, {panel.n_samples} samples\n",
        "Score in percent with its 95 % interval, by share of visual tokens kept; last, the prefill FLOPs that these "
        "shares leave.\n",
        _table(panel, lambda point: _interval(point.score) + point.mark, full=True),
    ]
    if panel.full is not None:
        parts += [
            "Retention: score in percent of the unpruned score, paired by sample; `*` where it differs from it, "
            "corrected for all cells of this table.\n",
            _table(
                panel,
                lambda point: _interval(point.retention) + mark(point.loss_pvalue) + point.mark,
            ),
        ]
    if any(point.gain for curve in panel.curves for point in curve.points):
        parts += [
            "Points above random dropping at the same layer, paired by sample, with the p-value of "
            "the exact paired test; `*` where it is below 0.05 when corrected for all cells of this table.\n",
            _table(panel, _gain, only=lambda curve: curve.floor is not None),
        ]
    return "\n".join([*parts, *note_paragraphs(panel)])


def _table(
    panel: CurvePanel,
    cell: Callable[[CurvePoint], str],
    full: bool = False,
    only: Callable[[Curve], bool] = lambda curve: True,
) -> str:
    ratios = panel.ratios
    lines = []
    if full and panel.full is not None:
        blank = [""] * (len(ratios) - 1)
        lines.append(["unpruned", _interval(panel.full) + panel.full_mark, *blank, "100 %"])
    for curve in filter(only, panel.curves):
        points = map(curve.at, ratios)
        cells = ["" if point is None else cell(point) for point in points]
        lines.append([curve.name, *cells, *[_costs(curve)] * full])
    return markdown_table(["method", *map(panel.heading, ratios), *["FLOPs"] * full], lines)


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else interval.percent


def _costs(curve: Curve) -> str:
    """Return the shares of prefill FLOPs along a curve in percent."""
    shares = [point.flops for point in curve.points if point.flops is not None]
    return " / ".join(f"{100 * share:.0f}" for share in shares) + " %" if shares else ""


def _gain(point: CurvePoint) -> str:
    if point.gain is None or point.pvalue is None:
        return ""
    pvalue_text = "p < 0.001" if point.pvalue < 0.001 else f"p = {point.pvalue:.3f}"
    return f"{point.gain.points}, {pvalue_text}{mark(point.corrected_pvalue)}{point.mark}"
