"""Points of curves as a frame, which prints them as the table of a paper and draws them as a figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pandas as pd

from espalier.harness.reports.frame import POINTS
from espalier.harness.reports.printed_text import escape_latex, readable, render
from espalier.harness.store.row_text import FOOTNOTE, mark


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
        marks: bool = True,
        counts: bool = True,
        costs: bool = True,
        caption: str | None = None,
        label: str | None = None,
        **options: Any,
    ) -> str | None:
        """Return the points as a LaTeX table: a block for each benchmark, methods by shares of visual tokens kept.

        Scores are in percent; controls stand below a rule. With several benchmarks the last block is their average,
        with the percent of the unpruned score kept in brackets, for methods that all of them have. Bold is the best
        method of a column if the paired test tells it from every other one there; else those that it does not tell
        from the best are underlined, unless these are all. Controls and averages are neither. A note says so.

        Args:
            buf: a file to write; None: the text is returned.
            intervals: whether 95 % intervals are printed.
            marks: whether `+` and `-` mark scores above and below random dropping.
            counts: whether numbers of samples are printed.
            costs: whether the last column has the prefill FLOPs.
            caption: of the table; None: the model and what it has.
            label: of the table; None: `tab:` and the model.
            **options: of `pandas.DataFrame.to_latex`, for frames that lack columns of `POINTS`.
        """
        if not set(POINTS) <= set(self.columns):
            return cast(
                "str | None",
                super().to_latex(buf, caption=caption or None, label=label or None, **options),
            )
        model = ", ".join(self.model.unique())
        if caption is None:
            caption = f"{model}: score by share of visual tokens kept."
        if label is None:
            label = f"tab:{re.sub(r'[^a-zA-Z0-9_]+', '-', model)}"
        extras = LatexOptions(intervals, marks, counts, costs)
        text = _latex(self, extras, caption=caption, label=label)
        if buf is None:
            return text
        Path(buf).write_text(text, encoding="utf-8")
        return None

    def plot(self, path: str | Path | None = None, **options: Any) -> Any:
        """Return the points as the figure of a report: score by share removed, a plot for each benchmark.

        Args:
            path: a file to write, such as `curves.png` or `curves.pdf`.
            **options: of `pandas.DataFrame.plot`, which then draws, as it does if columns of `POINTS` are missing.
        """
        if options or not set(POINTS) <= set(self.columns):
            return super().plot(**options)
        # Imports matplotlib and scipy.
        from espalier.harness.reports.curves.curve_figure import draw_curves
        from espalier.harness.reports.curves.curve_points import panels_of
        from espalier.harness.reports.curves.figures import save

        figure = draw_curves(panels_of(self))
        if path is not None:
            save(figure, Path(path).with_suffix(""), [Path(path).suffix[1:] or "png"])
        return figure


#: Name of the unpruned model's line.
UNPRUNED = "none"

#: Corrected p-values below this are marked; one table in twenty has a mark by chance.
LEVEL = 0.05


class LatexOptions(NamedTuple):
    """What a LaTeX table prints beside scores, as the arguments of `PointFrame.to_latex`."""

    intervals: bool
    marks: bool
    counts: bool
    costs: bool


def _latex(points: pd.DataFrame, options: LatexOptions, **words: str) -> str:
    # A number of tokens is another share on each benchmark, and has one column.
    points = points.assign(
        ratio=points.groupby("keep").ratio.transform("mean").fillna(points.ratio)
    )
    pruned = points[points.curve != UNPRUNED]
    keeps = dict(sorted(zip(pruned.ratio, pruned.keep, strict=True), key=lambda pair: pair[0]))
    blocks = []
    for _, block in points.groupby(["model", "benchmark"], sort=False):
        first, full = block.iloc[0], block[block.curve == UNPRUNED]
        title = escape_latex(f"{first.benchmark}, {readable(first.metric)} (%)")
        facts = [f"$n = {first.n_samples}$"] * options.counts
        for _, row in full[:1].iterrows():
            facts += [f"unpruned {_cell(row)} {_interval(row) * options.intervals}".rstrip()]
        titles = [rf"\textit{{{title}}}", *([", ".join(facts)] if facts else [])]
        blocks.append((titles, _groups(block[block.curve != UNPRUNED], [*keeps], options)))
    average = _average(pruned, len(blocks))
    if len(blocks) > 1 and not average.empty:
        title = f"average of {len(blocks)} benchmarks (percent of the unpruned score kept)"
        bare = options._replace(intervals=False)
        blocks.append(([rf"\textit{{{title}}}"], _groups(average, [*keeps], bare)))
    heads = [
        rf"{100 * (1 - ratio):.4g}\,\%" if pd.isna(keep) else f"{keep:g} tokens"
        for ratio, keep in keeps.items()
    ]
    heads += [r"FLOPs (\%)"] * options.costs
    notes = [
        *_notes(pruned, options),
        *([f"{escape_latex(FOOTNOTE)}."] if points.unread.any() else []),
    ]
    return render("points.tex", heads=heads, blocks=blocks, notes=notes, **words)


def _notes(points: pd.DataFrame, options: LatexOptions) -> list[str]:
    """Return sentences, in LaTeX, on what a table marks and how it was tested."""
    notes = [
        "Bold: the best method of a column, which the test tells from every other one; underlined: methods that it "
        "does not tell from the best. Without either it tells none from the best.",
    ] * bool((points.best_p < 1).any())
    if options.marks and points.gain_p_holm.notna().any():
        notes.append(
            "$^{+}$ above and $^{-}$ below random dropping at the same layer; methods without random dropping there "
            "have no such mark."
        )
    if notes:
        notes.append(
            f"Tests are paired by sample, two-sided (McNemar's exact test for right and wrong answers, else a "
            f"permutation test): $p < {LEVEL}$ after Holm's correction over the benchmark."
        )
    if points.control.any():
        notes.append("Below the thin rule: controls, which no paper proposes.")
    if options.costs:
        notes.append(
            "FLOPs: of the language model's prefill, in percent of the unpruned one, column by column."
        )
    return notes


def _groups(
    block: pd.DataFrame, ratios: Sequence[float], options: LatexOptions
) -> list[list[list[str]]]:
    """Return the lines of methods, then those of controls; a group without lines is left out."""
    controls = block.control.astype(bool)
    return [
        _lines(cells, ratios, options)
        for cells in (block[~controls], block[controls])
        if len(cells)
    ]


def _lines(block: pd.DataFrame, ratios: Sequence[float], options: LatexOptions) -> list[list[str]]:
    """Return the line of each curve and, if asked for, of its intervals."""
    lines = []
    for curve, cells in block.groupby("curve", sort=False):
        texts, shares, ends = (dict.fromkeys(ratios, gap) for gap in ("--", "--", ""))
        for _, row in cells.iterrows():
            style, peers = "%s", block.best_p[block.ratio == row.ratio].dropna() >= LEVEL
            # If the test tells no method from the best, marks would say nothing.
            if not peers.all() and row.best_p >= LEVEL:
                style = r"\textbf{%s}" if peers.sum() == 1 else r"\underline{%s}"
            texts[row.ratio] = _cell(row, options.marks, style)
            shares[row.ratio] = f"{100 * row.flops_share:.0f}"
            ends[row.ratio] = _interval(row)
        costs = ["/".join(shares.values())] * options.costs
        lines.append([escape_latex(str(curve)), *texts.values(), *costs])
        lines += [["", *ends.values(), *[""] * options.costs]] * options.intervals
    return lines


def _cell(row: pd.Series, marks: bool = False, style: str = "%s") -> str:
    text = style % f"{100 * row.score:.1f}"
    if marks and row.get("gain_p_holm", 1.0) < LEVEL:
        text += "$^{+}$" if row.gain > 0 else "$^{-}$"
    if "kept" in row:
        text += f" ({100 * row.kept:.1f})"
    return text + escape_latex(mark(bool(row.unread)))


def _interval(row: pd.Series) -> str:
    low, high = (100 * row.get(f"score_{end}", float("nan")) for end in ("low", "high"))
    return "" if pd.isna(low) else rf"{{\scriptsize [{low:.1f}, {high:.1f}]}}"


def _average(points: pd.DataFrame, benchmarks: int) -> pd.DataFrame:
    """Return the mean score and retention of each (curve, ratio) that every benchmark has with an unpruned score.

    No test compares them: `best_p` is NaN.
    """
    grouped = points[points.retention.notna()].groupby(["curve", "ratio"], sort=False)
    means = grouped.agg(
        control=("control", "first"),
        score=("score", "mean"),
        kept=("retention", "mean"),
        flops_share=("flops_share", "mean"),
        unread=("unread", "any"),
        benchmarks=("score", "size"),
    )
    return means[means.benchmarks == benchmarks].reset_index().assign(best_p=float("nan"))
