"""Mean retention over several benchmarks, with an interval."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.harness.reports.curves.curve_points import Panel
from espalier.harness.stats import Interval, average_retention


def averages(panels: Sequence[Panel]) -> dict[tuple[str, float], Interval]:
    """Return the mean retention of each (curve, ratio) that all panels have and whose unpruned score is above zero.

    Every benchmark counts the same, and its samples are resampled within it.
    """
    pairs = [
        {
            (curve.name, point.ratio): (point.scores, panel.unpruned)
            for curve in panel.curves
            for point in curve.points
            if point.retention is not None
        }
        for panel in panels
    ]
    shared = [key for key in pairs[0] if all(key in one for one in pairs)] if pairs else []
    return {
        key: average_retention(
            [
                (ours, full)
                for ours, full in (one[key] for one in pairs)
                if ours is not None and full is not None
            ]
        )
        for key in shared
    }
