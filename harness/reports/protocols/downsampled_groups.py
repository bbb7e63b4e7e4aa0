"""VTC-Bench's protocol (Liao et al., arXiv 2510.07143, ACL 2026) over stored results.

Samples that the unpruned model answers wrong are left out. Of the others, those that it also answers right from a
downsampled picture at the same budget are `simple`, those that it then answers wrong are `difficult`: downsampling
loses them. A method is worth its selection if it keeps what downsampling loses, without losing what it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from espalier.harness.errors import UserError, tell_once
from espalier.harness.reports.curves.curve_points import Scores
from espalier.harness.reports.curves.figures import Plot, Series, marker, percent_spot
from espalier.harness.reports.curves.plot_style import COLOURS
from espalier.harness.reports.curves.stored_rows import RunScores, StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    BenchmarkRuns,
    Cell,
    MethodPoint,
    ProtocolTable,
    grouped_runs,
    is_control,
    kept_text,
    nothing_to_show,
)
from espalier.harness.stats import Interval, by_unit, difference_interval, mean_interval

#: Groups with colour and face of their marks, apart in greyscale as well.
LOOKS = (("difficult", COLOURS[0], COLOURS[0]), ("simple", "#6E6E6E", "#FFFFFF"))

#: The method that groups the samples.
FILTER = "downsample"

NAME, TITLE = "vtc", "What downsampling loses (VTC-Bench)"

WORDS = (
    "Samples that the unpruned model answers right, by whether it still does from a picture downsampled to the same "
    "budget: `difficult` where it does not, `simple` where it does. A column is the share of its group that a method "
    "answers right, in percent with its 95 % interval; `difficult` is how much of what downsampling loses the method "
    "keeps. `net` is points above downsampling over both groups.",
    "Groups follow the paper; its released script calls the simple group A and the difficult one B. Not matched: there "
    "the filter is Qwen2-VL or LLaVA-OneVision on a small picture with fewer tokens; here it is the evaluated model "
    "itself, and where the tower's resolution is fixed, the small picture is enlarged again. Scorers are those of the "
    "benchmarks here.",
)


def downsampled_groups(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return the accuracy of each method by group; benchmarks without right or wrong answers are reported and skipped.

    Raises:
        UserError: no benchmark has the unpruned model and downsampling with scores of 0 and 1.
    """
    lines: list[Mapping[str, Cell]] = []
    refused = None
    for group in grouped_runs(results):
        try:
            check_binary(group)
        except UserError as error:
            refused = error
            tell_once(f"--protocol={NAME}: left out: {error}")
            continue
        for point, runs in group.points.items():
            if runs[0].method == FILTER and group.unpruned is not None:
                lines += _lines(group, point, runs)
    if not lines:
        raise refused or nothing_to_show(
            NAME,
            "method=none and method=downsample",
            "-m method=none,downsample,random,fastv ratio=0.9",
        )
    return ProtocolTable(NAME, TITLE, WORDS, lines, _plots(lines))


def check_binary(group: BenchmarkRuns) -> None:
    """Raise UserError if a run has a sample that is neither right nor wrong."""
    for run in group.compared.runs:
        for (task, number), score in run.scores.items():
            if score not in (0.0, 1.0):
                raise UserError(
                    f"{group.benchmark}: {group.metric} of sample {task}/{number} is {score:.4g}, neither 0 nor 1; "
                    "valid: benchmarks of right and wrong answers"
                )


def _lines(
    group: BenchmarkRuns, point: MethodPoint, filtering: Sequence[RunScores]
) -> list[Mapping[str, Cell]]:
    """Return a line for each method at the amount of a filter, the best on difficult samples first."""
    unpruned = group.unpruned
    assert unpruned is not None  # checked by the caller
    filtered = group.scores(filtering[:1])
    right = unpruned == 1
    difficult, simple = right & (filtered == 0), right & (filtered == 1)
    lines: list[Mapping[str, Cell]] = []
    for compared_point, runs in group.points.items():
        # The filter itself is right in all of one group, and in none of the other.
        if compared_point[1:] != point[1:] or compared_point == point:
            continue
        scores = group.scores(runs)
        lines.append(
            {
                "model": group.model,
                "benchmark": group.benchmark,
                "method": compared_point[0] + " (control)" * is_control(runs),
                "kept": kept_text(compared_point),
                "difficult": _accuracy(group, scores, difficult),
                "simple": _accuracy(group, scores, simple),
                "net": _net(group, scores, filtered, right),
                "n difficult": int(difficult.sum()),
                "n simple": int(simple.sum()),
            }
        )
    return lines


def _accuracy(group: BenchmarkRuns, scores: Scores, members: NDArray[np.bool_]) -> Interval | None:
    if not members.any():
        return None
    units = [unit for unit, member in zip(group.compared.units, members, strict=True) if member]
    return mean_interval(by_unit(scores[members], units))


def _net(
    group: BenchmarkRuns, scores: Scores, filtered: Scores, right: NDArray[np.bool_]
) -> Interval | None:
    if not right.any():
        return None
    units = [unit for unit, member in zip(group.compared.units, right, strict=True) if member]
    return difference_interval(by_unit(scores[right], units), by_unit(filtered[right], units))


def _plots(lines: Sequence[Mapping[str, Cell]]) -> list[Plot]:
    """Return a plot for each benchmark and amount, the methods in one order: those that keep most first."""
    shares: dict[str, list[float]] = {}
    for line in lines:
        cell = line["difficult"]
        shares.setdefault(str(line["method"]), []).append(
            cell.value if isinstance(cell, Interval) else 0.0
        )
    rows = {
        name: row for row, name in enumerate(sorted(shares, key=lambda name: -fmean(shares[name])))
    }
    titles = dict.fromkeys((line["model"], line["benchmark"], line["kept"]) for line in lines)
    plots = []
    for model, benchmark, share in titles:
        part = [
            line
            for line in lines
            if (line["model"], line["benchmark"], line["kept"]) == (model, benchmark, share)
        ]
        series = []
        for name, colour, face in LOOKS:
            spots = [
                percent_spot(rows[str(line["method"])], cell)
                for line in part
                if isinstance(cell := line[name], Interval)
            ]
            look = marker("o", color=colour, markerfacecolor=face, zorder=4)
            series.append(Series(name, spots, look, key=True))
        ticks: dict[float, str] = {row: name for name, row in rows.items()}
        plots.append(
            Plot(
                "dots",
                f"{benchmark}, {share}",
                series,
                str(model),
                values="right (%)",
                ticks=ticks,
            )
        )
    return plots
