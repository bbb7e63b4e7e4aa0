"""VTC-Bench's protocol (Liao et al., arXiv 2510.07143, ACL 2026) over stored results.

Samples that the unpruned model answers wrong are left out. Of the others, those that it also answers right from a
downsampled picture at the same budget are `simple`, those that it then answers wrong are `difficult`: downsampling
loses them. A method is worth its selection if it keeps what downsampling loses, without losing what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.harness.errors import UserError, tell_once
from espalier.harness.reports.curves.comparison import ComparedRuns, MethodPoint
from espalier.harness.reports.curves.curve_points import Scores
from espalier.harness.reports.curves.figures import COLOURS, marker
from espalier.harness.reports.frame import StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    Line,
    ProtocolTable,
    frame_of,
    grouped_runs,
    kept_text,
    method_text,
    nothing_to_show,
    plots_by_method,
)
from espalier.harness.stats import by_unit, difference_interval, mean_interval

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
    lines: list[Line] = []
    refused = None
    for group in grouped_runs(results):
        try:
            check_binary(group)
        except UserError as error:
            refused = error
            tell_once(f"--protocol={NAME}: left out: {error}")
            continue
        unpruned = group.unpruned
        for point, runs in group.points.items():
            if runs[0].row["method"] == FILTER and unpruned is not None:
                lines += _lines(group, point, group.scores(runs[:1]), unpruned == 1)
    if not lines:
        raise refused or nothing_to_show(
            NAME,
            "method=none and method=downsample",
            "-m method=none,downsample,random,fastv ratio=0.9",
        )
    looks = {
        name: marker("o", color=colour, markerfacecolor=face, zorder=4)
        for name, colour, face in LOOKS
    }
    frame = frame_of(lines)
    plots = plots_by_method(frame, ("model", "benchmark", "kept"), looks, "right (%)")
    return ProtocolTable(NAME, TITLE, WORDS, frame, plots)


def check_binary(group: ComparedRuns) -> None:
    """Raise UserError if a run has a sample that is neither right nor wrong."""
    for run in group.runs:
        for (task, number), score in run.scores.items():
            if score not in (0.0, 1.0):
                raise UserError(
                    f"{run.row['benchmark']}: {group.metric} of sample {task}/{number} is {score:.4g}, neither 0 nor "
                    "1; valid: benchmarks of right and wrong answers"
                )


def _lines(
    group: ComparedRuns, point: MethodPoint, filtered: Scores, right: NDArray[np.bool_]
) -> Iterator[Line]:
    """Yield a line for each method at the amount of a filter.

    Args:
        group: the runs of a benchmark.
        point: the filter's.
        filtered: its scores.
        right: whether the unpruned model answers a sample right.
    """
    difficult, simple = right & (filtered == 0), right & (filtered == 1)

    def of(scores: Scores, members: NDArray[np.bool_]) -> Scores:
        """Return the scores of some samples by unit of statistics."""
        units = [unit for unit, member in zip(group.units, members, strict=True) if member]
        return by_unit(scores[members], units)

    for compared_point, runs in group.points.items():
        # The filter itself is right in all of one group, and in none of the other.
        if compared_point[1:] != point[1:] or compared_point == point:
            continue
        scores = group.scores(runs)
        yield {
            "model": group.row["model"],
            "benchmark": group.row["benchmark"],
            "method": method_text(compared_point, runs),
            "kept": kept_text(compared_point),
            "difficult": mean_interval(of(scores, difficult)) if difficult.any() else None,
            "simple": mean_interval(of(scores, simple)) if simple.any() else None,
            "net": difference_interval(of(scores, right), of(filtered, right))
            if right.any()
            else None,
            "n difficult": int(difficult.sum()),
            "n simple": int(simple.sum()),
        }
