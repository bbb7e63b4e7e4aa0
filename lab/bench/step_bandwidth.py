"""A step's time and the shortest time in which its bytes can be read."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from lab.bench.bench_setup import Figure


def against_bandwidth(
    part: str, name: str, ms: Sequence[float], n_bytes: int, rate: float
) -> list[Figure]:
    """Return the time of a step, the shortest in which its bytes can be read, and the percentage reached.

    Args:
        part: of the benchmark.
        name: of the step.
        ms: its times in milliseconds.
        n_bytes: weights and cache that it reads.
        rate: bytes a second, `copy_rate`.
    """
    fastest, typical = 1e3 * n_bytes / rate, median(ms)
    low, _, high = quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else (typical,) * 3
    gigabytes = f"{n_bytes / 1e9:.3g} GB of weights and cache"
    return [
        Figure(part, f"one token, {name}", typical, "ms", (low, high)),
        Figure(part, f"least that bandwidth allows, {name}: {gigabytes}", fastest, "ms"),
        Figure(part, f"bandwidth reached, {name}", 100 * fastest / typical, "%"),
    ]
