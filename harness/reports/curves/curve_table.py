"""The data of the curves as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from espalier.harness.reports.curves.curve_points import Curve, CurvePanel, CurvePoint, share
from espalier.harness.stats import Interval, average_retention

#: Corrected p-values below this are marked; one table in twenty has a mark by chance.
LEVEL = 0.05


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
    headings = (share(amount) if isinstance(amount, float) else amount for amount in amounts)
    lines = [
        f"### Mean retention over {len(panels)} benchmarks\n",
        "In percent of the unpruned score, each benchmark weighed alike, its samples resampled within it.\n",
        f"| method | {' | '.join(headings)} |",
        "| --- |" + " ---: |" * len(amounts),
    ]
    marks = {
        (curve.name, point.amount): point.mark
        for panel in panels
        for curve in panel.curves
        for point in curve.points
        if point.unread
    }
    for name in dict.fromkeys(name for name, _ in retentions):
        keys = [(name, amount) for amount in amounts]
        cells = " | ".join(_interval(retentions.get(key)) + marks.get(key, "") for key in keys)
        lines.append(f"| {name} | {cells} |")
    return ["\n".join(lines) + "\n"]


def mark(pvalue: float | None) -> str:
    """Return a star for a corrected p-value below 0.05."""
    return "*" if pvalue is not None and pvalue < LEVEL else ""


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
            _table(panel, _gain_cell, only=lambda curve: curve.floor is not None),
        ]
    return "\n".join([*parts, *note_paragraphs(panel)])


def note_paragraphs(panel: CurvePanel) -> list[str]:
    """Return the panel's notes as paragraphs."""
    return [f"{note[0].upper()}{note[1:]}.\n" for note in panel.notes]


def _table(
    panel: CurvePanel,
    cell: Callable[[CurvePoint], str],
    full: bool = False,
    only: Callable[[Curve], bool] = lambda curve: True,
) -> str:
    ratios = panel.ratios
    titles = [*map(panel.heading, ratios), *["FLOPs"] * full]
    lines = [f"| method | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    if full and panel.full is not None:
        cells = [_interval(panel.full) + panel.full_mark, *[""] * (len(ratios) - 1), "100 %"]
        lines.append(f"| unpruned | {' | '.join(cells)} |")
    for curve in filter(only, panel.curves):
        texts = {point.ratio: cell(point) for point in curve.points}
        cells = [texts.get(ratio, "") for ratio in ratios] + [_costs(curve)] * full
        lines.append(f"| {curve.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else interval.percent


def _costs(curve: Curve) -> str:
    """Return the shares of prefill FLOPs along a curve in percent."""
    shares = [point.flops for point in curve.points if point.flops is not None]
    return " / ".join(f"{100 * share:.0f}" for share in shares) + " %" if shares else ""


def _gain_cell(point: CurvePoint) -> str:
    if point.gain is None or point.pvalue is None:
        return ""
    pvalue_text = "p < 0.001" if point.pvalue < 0.001 else f"p = {point.pvalue:.3f}"
    return f"{point.gain.points}, {pvalue_text}{mark(point.corrected_pvalue)}{point.mark}"


def averages(panels: Sequence[CurvePanel]) -> dict[tuple[str, float | str], Interval]:
    """Return the mean retention of each (curve, amount) that all panels have with an unpruned score above zero.

    All benchmarks have the same weight; samples are resampled within each benchmark.
    """
    scores_by_panel = [
        {
            (curve.name, point.amount): (point.scores, panel.unpruned)
            for curve in panel.curves
            for point in curve.points
            if point.retention is not None
        }
        for panel in panels
    ]
    if not scores_by_panel:
        return {}
    shared = [key for key in scores_by_panel[0] if all(key in scores for scores in scores_by_panel)]
    return {
        key: average_retention(
            [
                (pruned, full)
                for pruned, full in (scores[key] for scores in scores_by_panel)
                if pruned is not None and full is not None
            ]
        )
        for key in shared
    }
