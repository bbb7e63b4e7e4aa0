"""Tables in Markdown: of any rows, and of curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from espalier.harness.reports.curves.comparison import averages
from espalier.harness.reports.curves.curve_points import (
    BaselineGroup,
    CurvePanel,
    grid,
    share,
    title_of,
    verdict,
)
from espalier.harness.reports.curves.point_frame import LEVEL
from espalier.harness.reports.printed_text import markdown_table
from espalier.harness.store.row_text import mark

#: The text of a frame's row, by heading of the column.
Columns = Mapping[str, Callable[[Any], str]]


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
    """Return a table of a frame's rows by two of its columns; `heads` are the headings of the second one's values."""
    texts = grid(cells, line, column, heads, text)
    lines = [[str(first), *line_texts] for first, line_texts in texts.items()]
    return markdown_table([line, *heads.values()], lines, align)


def markdown(panels: Sequence[CurvePanel]) -> str:
    """Return tables of scores, of retention and of gains over random for each benchmark, then means over all."""
    return "\n".join([*map(_benchmark, panels), *_over_all(panels)])


def _over_all(panels: Sequence[CurvePanel]) -> list[str]:
    """Return a table of mean retention over several benchmarks, for curves and ratios that all of them have."""
    means = averages(panels)
    if len(panels) < 2 or means.empty:
        return []
    amounts = means.sort_values("ratio", kind="stable").amount.unique()
    heads = [share(amount) if isinstance(amount, float) else amount for amount in amounts]
    texts = grid(
        means,
        "curve",
        "amount",
        amounts,
        lambda mean: f"{mean.retention.percent}{mark(mean.unread)}",
        "",
    )
    return [
        f"### Mean retention over {len(panels)} benchmarks\n\n"
        "In percent of the unpruned score, each benchmark weighed alike, its samples resampled within it.\n\n"
        + markdown_table(["method", *heads], [[name, *line] for name, line in texts.items()])
    ]


def _star(pvalue: float | None) -> str:
    """Return a star for a corrected p-value below 0.05."""
    return "*" if pvalue is not None and pvalue < LEVEL else ""


def note_paragraphs(panel: CurvePanel) -> list[str]:
    """Return the panel's notes as paragraphs."""
    return [f"{note[0].upper()}{note[1:]}.\n" for note in panel.notes]


def gains(panel: CurvePanel, group: BaselineGroup, names: Mapping[str, str]) -> str:
    """Return a table of scores by ratio with gains over random dropping; random dropping is the first line."""
    titles, heads = group.names(names), panel.headings
    texts = grid(group.points, "curve", "ratio", heads, _gained)
    lines = [[titles[curve], *line] for curve, line in texts.items()]
    return markdown_table(["method", *heads.values()], lines)


def gains_over(
    panel: CurvePanel,
    floor: str,
    names: Mapping[str, str],
    rank: Callable[[pd.DataFrame], Any],
    full: str,
    title: str = "",
    setting: str = "",
) -> str:
    """Return a panel's gains over one random baseline as a table with a heading.

    Args:
        panel: of one benchmark.
        floor: name of the baseline's curve, which is the first line.
        names: of config files, by curve name.
        rank: sort key of the other curves, of their points.
        full: what the unpruned model's score was measured with.
        title: of the heading; by default the benchmark.
        setting: words on how scores were measured.
    """
    curves = [points for _, points in panel.points.groupby("curve", sort=False)]
    curves.sort(key=lambda points: (points.curve.iloc[0] != floor, rank(points)))
    group = BaselineGroup(curves[0].layer.iloc[0], pd.concat(curves))
    line = f"{panel.metric} on {panel.n_samples} samples{setting}{panel.full_text(full)}."
    return f"### {title or panel.benchmark}\n\n{line}\n\n{gains(panel, group, names)}"


def sign_table(
    panels: Sequence[CurvePanel],
    group: BaselineGroup,
    heads: Sequence[str],
    names: Mapping[str, str],
) -> str:
    """Return a line for each curve of a group, best first, and a sign for each ratio of each panel.

    `+` is above random dropping, `-` below, `.` neither, a gap where there is no point.
    """
    signs = [grid(panel.points, "curve", "ratio", panel.ratios, _sign, " ") for panel in panels]
    _, *curves = dict.fromkeys(group.points.curve)
    lines = [
        [
            title_of(curve, names),
            *(f"`{''.join(by_curve[curve])}`" if curve in by_curve else "" for by_curve in signs),
        ]
        for curve in curves
    ]

    def rank(line: Sequence[str]) -> tuple[int, str]:
        signs = "".join(line[1:])
        return signs.count("-") - signs.count("+"), line[0]

    return markdown_table([group.title, *heads], sorted(lines, key=rank), "l")


def _sign(point: Any) -> str:
    sign = {"above": "+", "below": "-", "": "."}[verdict(point.gain)]
    return f"{sign}{point.mark}"


def _gained(point: Any) -> str:
    if point.gain is None:
        return _score(point)
    judged = verdict(point.gain)
    note = f" **{judged}**{_star(point.gain_p_holm)}" if judged else ""
    return f"{100 * point.score.value:.1f}{point.mark}, {point.gain.points}{note}"


def _benchmark(panel: CurvePanel) -> str:
    heads, points = panel.headings, panel.points

    def table(text: Callable[[Any], str], points: pd.DataFrame) -> str:
        texts = grid(points, "curve", "ratio", heads, text, "")
        return markdown_table(
            ["method", *heads.values()], [[name, *line] for name, line in texts.items()]
        )

    scores = grid(points, "curve", "ratio", heads, _score, "")
    lines = [
        [name, *line, _costs(points[points.curve == name].flops_share)]
        for name, line in scores.items()
    ]
    if panel.full is not None:
        gaps = [""] * (len(heads) - 1)
        lines.insert(0, ["unpruned", panel.full.percent + panel.full_mark, *gaps, "100 %"])
    parts = [
        f"### {panel.benchmark}: {panel.metric}, {panel.n_samples} samples\n",
        "Score in percent with its 95 % interval, by share of visual tokens kept; last, the prefill FLOPs that these "
        "shares leave.\n",
        markdown_table(["method", *heads.values(), "FLOPs"], lines),
    ]
    if panel.full is not None:
        parts += [
            "Retention: score in percent of the unpruned score, paired by sample; `*` where it differs from it, "
            "corrected for all cells of this table.\n",
            table(_retention, points),
        ]
    if points.gain.notna().any():
        parts += [
            "Points above random dropping at the same layer, paired by sample, with the p-value of "
            "the exact paired test; `*` where it is below 0.05 when corrected for all cells of this table.\n",
            table(_gain, points[points.floor.notna()]),
        ]
    return "\n".join([*parts, *note_paragraphs(panel)])


def _costs(shares: pd.Series) -> str:
    """Return the shares of prefill FLOPs along a curve in percent."""
    return " / ".join(f"{100 * flops:.0f}" for flops in shares) + " %"


def _score(point: Any) -> str:
    return f"{point.score.percent}{point.mark}"


def _retention(point: Any) -> str:
    percent = "" if point.retention is None else point.retention.percent
    return f"{percent}{_star(point.lost_p)}{point.mark}"


def _gain(point: Any) -> str:
    if point.gain is None:
        return ""
    pvalue_text = "p < 0.001" if point.gain_p < 0.001 else f"p = {point.gain_p:.3f}"
    return f"{point.gain.points}, {pvalue_text}{_star(point.gain_p_holm)}{point.mark}"
