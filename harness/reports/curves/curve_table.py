"""Tables in Markdown: of any rows, and of curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from espalier.harness.reports.curves.comparison import averages
from espalier.harness.reports.curves.curve_points import (
    BaselineGroup,
    Curve,
    CurvePanel,
    CurvePoint,
    share,
)
from espalier.harness.reports.printed_text import markdown_table
from espalier.harness.stats import Interval

#: The text of a frame's row, by heading of the column.
Columns = Mapping[str, Callable[[Any], str]]

#: Corrected p-values below this are marked; one table in twenty has a mark by chance.
LEVEL = 0.05


def cell_table(cells: pd.DataFrame, columns: Columns) -> str:
    """Return a table with a line for each row of a frame."""
    lines = [[text(cell) for text in columns.values()] for cell in cells.itertuples()]
    return markdown_table([*columns], lines)


def grid_table(
    cells: pd.DataFrame,
    line: str,
    column: str,
    heads: Mapping[Any, str],
    text: Callable[[Any], str],
    align: str = "lr",
) -> str:
    """Return a table of a frame's rows by two of its columns, `-` where no row has both values.

    Args:
        cells: the rows.
        line: the column with a line for each value, in the order of the rows.
        column: the other one.
        heads: its values with their headings.
        text: of a row.
        align: as of `markdown_table`.
    """
    texts: dict[Any, dict[Any, str]] = {}
    for cell in cells.itertuples():
        line_texts = texts.setdefault(getattr(cell, line), dict.fromkeys(heads, "-"))
        line_texts[getattr(cell, column)] = text(cell)
    lines = [[str(first), *line_texts.values()] for first, line_texts in texts.items()]
    return markdown_table([line, *heads.values()], lines, align)


def markdown(panels: Sequence[CurvePanel]) -> str:
    """Return tables of scores, of retention and of gains over random for each benchmark, then means over all."""
    return "\n".join([*map(_benchmark, panels), *_over_all(panels)])


def _over_all(panels: Sequence[CurvePanel]) -> list[str]:
    """Return a table of mean retention over several benchmarks, for curves and ratios that all of them have."""
    retentions = averages(panels)
    if len(panels) < 2 or not retentions:
        return []
    ratios = {point.amount: point.ratio for curve in panels[0].curves for point in curve.points}
    amounts = sorted({amount for _, amount in retentions}, key=lambda amount: ratios[amount])
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
    heads = [share(amount) if isinstance(amount, float) else amount for amount in amounts]
    return [
        f"### Mean retention over {len(panels)} benchmarks\n\n"
        "In percent of the unpruned score, each benchmark weighed alike, its samples resampled within it.\n\n"
        + markdown_table(["method", *heads], lines)
    ]


def _star(pvalue: float | None) -> str:
    """Return a star for a corrected p-value below 0.05."""
    return "*" if pvalue is not None and pvalue < LEVEL else ""


def note_paragraphs(panel: CurvePanel) -> list[str]:
    """Return the panel's notes as paragraphs."""
    return [f"{note[0].upper()}{note[1:]}.\n" for note in panel.notes]


def gains(panel: CurvePanel, group: BaselineGroup, names: Mapping[str, str]) -> str:
    """Return a table of scores by ratio with gains over random dropping; random dropping is the first line."""
    lines = [
        [group.name(curve, names), *_texts(panel, curve, _gained, "-")]
        for curve in (group.floor, *group.curves)
    ]
    return markdown_table(["method", *map(panel.heading, panel.ratios)], lines)


def gains_over(
    panel: CurvePanel,
    floor: str,
    names: Mapping[str, str],
    rank: Callable[[Curve], Any],
    full: str,
    title: str = "",
    setting: str = "",
) -> str:
    """Return a panel's gains over one random baseline as a table with a heading.

    Args:
        panel: of one benchmark.
        floor: name of the baseline's curve, which is the first line.
        names: of config files, by curve name.
        rank: sort key of the other curves.
        full: what the unpruned model's score was measured with.
        title: of the heading; by default the benchmark.
        setting: words on how scores were measured.
    """
    first, *compared_curves = sorted(
        panel.curves, key=lambda curve: (curve.name != floor, rank(curve))
    )
    table = gains(panel, BaselineGroup(first, tuple(compared_curves)), names)
    line = f"{panel.metric} on {panel.n_samples} samples{setting}{panel.full_text(full)}."
    return f"### {title or panel.benchmark}\n\n{line}\n\n{table}"


def sign_table(
    panels: Sequence[CurvePanel],
    group: BaselineGroup,
    heads: Sequence[str],
    names: Mapping[str, str],
) -> str:
    """Return a line for each curve of a group, best first, and a sign for each ratio of each panel.

    `+` is above random dropping, `-` below, `.` neither, a gap where there is no point.
    """
    lines = [
        [curve.title(names), *(_signs(panel, curve.name) for panel in panels)]
        for curve in group.curves
    ]

    def rank(line: Sequence[str]) -> tuple[int, str]:
        signs = "".join(line[1:])
        return signs.count("-") - signs.count("+"), line[0]

    return markdown_table([group.title, *heads], sorted(lines, key=rank), "l")


def _signs(panel: CurvePanel, name: str) -> str:
    curve = next((curve for curve in panel.curves if curve.name == name), None)
    if curve is None:
        return ""
    signs = {"above": "+", "below": "-", "": "."}
    texts = _texts(panel, curve, lambda point: signs[point.verdict] + point.mark, " ")
    return f"`{''.join(texts)}`"


def _texts(
    panel: CurvePanel, curve: Curve, text: Callable[[CurvePoint], str], gap: str = ""
) -> list[str]:
    """Return the text of a curve's point at each ratio of a panel, `gap` where it has none."""
    return [gap if point is None else text(point) for point in map(curve.at, panel.ratios)]


def _gained(point: CurvePoint) -> str:
    if point.gain is None:
        return point.score.percent + point.mark
    note = f" **{point.verdict}**{_star(point.corrected_pvalue)}" if point.verdict else ""
    return f"{100 * point.score.value:.1f}{point.mark}, {point.gain.points}{note}"


def _benchmark(panel: CurvePanel) -> str:
    heads = ["method", *map(panel.heading, panel.ratios)]

    def table(text: Callable[[CurvePoint], str], curves: Iterable[Curve]) -> str:
        return markdown_table(
            heads, ([curve.name, *_texts(panel, curve, text)] for curve in curves)
        )

    lines = [
        [
            curve.name,
            *_texts(panel, curve, lambda point: point.score.percent + point.mark),
            _costs(curve),
        ]
        for curve in panel.curves
    ]
    if panel.full is not None:
        gaps = [""] * (len(panel.ratios) - 1)
        lines.insert(0, ["unpruned", panel.full.percent + panel.full_mark, *gaps, "100 %"])
    parts = [
        f"### {panel.benchmark}: {panel.metric}, {panel.n_samples} samples\n",
        "Score in percent with its 95 % interval, by share of visual tokens kept; last, the prefill FLOPs that these "
        "shares leave.\n",
        markdown_table([*heads, "FLOPs"], lines),
    ]
    if panel.full is not None:
        parts += [
            "Retention: score in percent of the unpruned score, paired by sample; `*` where it differs from it, "
            "corrected for all cells of this table.\n",
            table(_retention, panel.curves),
        ]
    if any(point.gain for curve in panel.curves for point in curve.points):
        parts += [
            "Points above random dropping at the same layer, paired by sample, with the p-value of "
            "the exact paired test; `*` where it is below 0.05 when corrected for all cells of this table.\n",
            table(_gain, (curve for curve in panel.curves if curve.floor is not None)),
        ]
    return "\n".join([*parts, *note_paragraphs(panel)])


def _costs(curve: Curve) -> str:
    """Return the shares of prefill FLOPs along a curve in percent."""
    shares = [f"{100 * point.flops:.0f}" for point in curve.points if point.flops is not None]
    return " / ".join(shares) + " %" if shares else ""


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else interval.percent


def _retention(point: CurvePoint) -> str:
    return _interval(point.retention) + _star(point.loss_pvalue) + point.mark


def _gain(point: CurvePoint) -> str:
    if point.gain is None or point.pvalue is None:
        return ""
    pvalue_text = "p < 0.001" if point.pvalue < 0.001 else f"p = {point.pvalue:.3f}"
    return f"{point.gain.points}, {pvalue_text}{_star(point.corrected_pvalue)}{point.mark}"
