"""Points of curves as a pandas frame that writes itself as the table of a paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from espalier.harness.reports.curves.printed_names import escape_latex, readable
from espalier.harness.reports.frame import POINTS
from espalier.harness.store.row_text import FOOTNOTE, mark

if TYPE_CHECKING:
    # Imports torch and scipy: seconds and half a gigabyte that reading rows does not need.
    from espalier.harness.reports.curves.curve_points import CurvePanel, CurvePoint
    from espalier.harness.stats import Interval

#: Name of the unpruned model's line.
UNPRUNED = "none"


class PointFrame(pd.DataFrame):
    """A line for each point of a curve; columns and types as in `POINTS`.

    A selection of its lines is a PointFrame too: `points[points.benchmark == "pope"].to_latex()`.
    """

    @property
    def _constructor(self) -> type[PointFrame]:
        return PointFrame

    def to_latex(
        self,
        buf: str | Path | None = None,
        *,
        intervals: bool = False,
        counts: bool = False,
        caption: str = "",
        label: str = "",
        **options: Any,
    ) -> str | None:
        """Return the points as a LaTeX table: a block for each benchmark, methods by shares of visual tokens kept.

        Scores are in percent. With several benchmarks the last block is their average, with the percent of the unpruned
        score kept in brackets, for methods that all of them have. In each column of a block the best is bold and the
        second underlined.

        Args:
            buf: a file to write; None: the text is returned.
            intervals: whether 95 % intervals are printed.
            counts: whether numbers of samples are printed.
            caption: of the table.
            label: of the table.
            **options: of `pandas.DataFrame.to_latex`, for frames that lack columns of `POINTS`.
        """
        if not set(POINTS) <= set(self.columns):
            return super().to_latex(buf, caption=caption or None, label=label or None, **options)
        text = _latex(self, intervals, counts, caption, label)
        if buf is None:
            return text
        Path(buf).write_text(text, encoding="utf-8")
        return None


def frame_of(panels: Sequence[CurvePanel]) -> PointFrame:
    """Return the points of panels; the unpruned model has its own line, `none` at ratio 0."""
    lines = [line for panel in panels for line in _panel_lines(panel)]
    columns = {name: [line.get(name) for line in lines] for name in POINTS}
    return PointFrame(
        {name: pd.array(values, dtype=POINTS[name][0]) for name, values in columns.items()}
    )


def _panel_lines(panel: CurvePanel) -> Iterator[dict[str, Any]]:
    shared = {
        "benchmark": panel.benchmark,
        "metric": panel.metric,
        "n_samples": panel.n_samples,
    }
    if panel.full is not None:
        yield {
            **shared,
            **{"curve": UNPRUNED, "control": True, "ratio": 0.0, "flops_share": 1.0},
            **_ends("score", panel.full),
            "unread": bool(panel.full_mark),
        }
    for curve in panel.curves:
        for point in curve.points:
            yield {
                **shared,
                **{"curve": curve.name, "control": curve.control, "floor": curve.floor},
                **_point(point),
            }


def _point(point: CurvePoint) -> dict[str, Any]:
    return {
        **{"ratio": point.ratio, "keep": point.keep, "flops_share": point.flops},
        **_ends("score", point.score),
        **_ends("retention", point.retention),
        **_ends("gain", point.gain),
        **{
            "lost_p": point.loss_pvalue,
            "gain_p": point.pvalue,
            "gain_p_holm": point.corrected_pvalue,
            "unread": point.unread,
        },
    }


def _ends(name: str, interval: Interval | None) -> dict[str, float]:
    if interval is None:
        return {}
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _latex(points: pd.DataFrame, intervals: bool, counts: bool, caption: str, label: str) -> str:
    # A number of tokens is another share on each benchmark, and has one column.
    points = points.assign(
        ratio=points.groupby("keep").ratio.transform("mean").fillna(points.ratio)
    )
    pruned = points[points.curve != UNPRUNED]
    keeps = dict(zip(pruned.ratio, pruned.keep, strict=True))
    ratios = sorted(keeps)
    width = len(ratios) + 1
    heads = [
        rf"{100 * (1 - ratio):.4g}\,\%" if pd.isna(keeps[ratio]) else f"{keeps[ratio]:g} tokens"
        for ratio in ratios
    ]
    out = [r"% needs \usepackage{booktabs}", r"\begin{table}", r"\centering"]
    out += [rf"\caption{{{escape_latex(caption)}}}"] * bool(caption)
    out += [rf"\label{{{label}}}"] * bool(label)
    out += [rf"\begin{{tabular}}{{l{'r' * len(ratios)}}}", r"\toprule"]
    out.append(" & ".join(["Visual tokens kept", *heads]) + r" \\")
    benchmarks = list(dict.fromkeys(points.benchmark))
    for benchmark in benchmarks:
        block = points[points.benchmark == benchmark]
        out += [r"\midrule", *_headings(block, width, intervals, counts)]
        out += _lines(block[block.curve != UNPRUNED], ratios, "score", intervals)
    if len(benchmarks) > 1 and not (average := _average(pruned, len(benchmarks))).empty:
        title = f"average of {len(benchmarks)} benchmarks (percent of the unpruned score kept)"
        out += [r"\midrule", _spanning(rf"\textit{{{title}}}", width)]
        out += _lines(average, ratios, "score", intervals=False)
    out += [r"\bottomrule", r"\end{tabular}"]
    if points.unread.any():
        out.append(rf"\par\footnotesize {escape_latex(FOOTNOTE)}.")
    return "\n".join([*out, r"\end{table}"]) + "\n"


def _headings(block: pd.DataFrame, width: int, intervals: bool, counts: bool) -> Iterator[str]:
    first = block.iloc[0]
    title = escape_latex(f"{first.benchmark}, {readable(first.metric)} (%)")
    yield _spanning(rf"\textit{{{title}}}", width)
    unpruned = block[block.curve == UNPRUNED]
    facts = [f"$n = {first.n_samples}$"] * counts
    facts += [f"unpruned {_cell(row, 'score', intervals)}" for _, row in unpruned[:1].iterrows()]
    if facts:
        yield _spanning(", ".join(facts), width)


def _spanning(title: str, width: int) -> str:
    """Return a line across all columns; it has no width of its own, or a long title would widen the last column."""
    return rf"\multicolumn{{{width}}}{{l}}{{\rlap{{{title}}}}} \\"


def _lines(
    block: pd.DataFrame, ratios: Sequence[float], column: str, intervals: bool
) -> Iterator[str]:
    """Yield the line of each curve; equal numbers, as printed, share their rank."""
    places: dict[tuple[str, float], int] = {}
    for ratio, cells in block.groupby("ratio"):
        ranks = (100 * cells[column]).round(1).rank(ascending=False, method="dense")
        places |= {(cells.curve[index], ratio): int(rank) for index, rank in ranks.items()}
    for name in dict.fromkeys(block.curve):
        cells = {row.ratio: row for _, row in block[block.curve == name].iterrows()}
        texts = [
            _ranked(_cell(cells[ratio], column, intervals), places[name, ratio])
            if ratio in cells
            else "--"
            for ratio in ratios
        ]
        yield " & ".join([escape_latex(name), *texts]) + r" \\"


def _ranked(text: str, place: int) -> str:
    number, _, suffix = text.partition(" ")
    style = {1: r"\textbf{%s}", 2: r"\underline{%s}"}.get(place, "%s")
    return f"{style % number} {suffix}".strip()


def _cell(row: pd.Series, column: str, intervals: bool) -> str:
    text = f"{100 * row[column]:.1f}"
    if intervals and pd.notna(row.get(f"{column}_low")):
        low, high = 100 * row[f"{column}_low"], 100 * row[f"{column}_high"]
        text += rf" {{\scriptsize [{low:.1f}, {high:.1f}]}}"
    if "kept" in row:
        text += f" ({100 * row.kept:.1f})"
    return text + escape_latex(mark(bool(row.unread)))


def _average(points: pd.DataFrame, benchmarks: int) -> pd.DataFrame:
    """Return the mean score and retention of each (curve, ratio) that every benchmark has with an unpruned score."""
    scored = points[points.retention.notna()]
    grouped = scored.groupby(["curve", "ratio"], sort=False)
    means = grouped.agg(
        score=("score", "mean"),
        kept=("retention", "mean"),
        unread=("unread", "any"),
        benchmarks=("score", "size"),
    )
    return means[means.benchmarks == benchmarks].reset_index()
