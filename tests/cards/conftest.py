"""How much of the matrix of cards a run walked, at its end."""

from __future__ import annotations

from itertools import combinations
from typing import Any

KINDS = ("family", "method", "placement")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many cells ran, and how many pairs of two of their properties they make."""
    reports = [report for stats in terminalreporter.stats.values() for report in stats]
    properties = (line for report in reports for line in getattr(report, "user_properties", ()))
    cells = {tuple(value) for key, value in properties if key == "cell"}
    pairs = []
    for first, second in combinations(range(3), 2):
        met = {(cell[first], cell[second]) for cell in cells}
        possible = len({cell[first] for cell in cells}) * len({cell[second] for cell in cells})
        pairs.append(f"{len(met)} of {possible} of {KINDS[first]} and {KINDS[second]}")
    if cells:
        terminalreporter.write_line(f"cards: {len(cells)} cells, pairs {', '.join(pairs)}")
