"""Mean retention over several benchmarks, with an interval."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.harness.reports.curves.curve_points import CurvePanel
from espalier.harness.stats import Interval, average_retention


def averages(panels: Sequence[CurvePanel]) -> dict[tuple[str, float], Interval]:
    """Return the mean retention of each (curve, ratio) that all panels have with an unpruned score above zero.

    All benchmarks have the same weight; samples are resampled within each benchmark.
    """
    scores_by_panel = [
        {
            (curve.name, point.ratio): (point.scores, panel.unpruned)
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
