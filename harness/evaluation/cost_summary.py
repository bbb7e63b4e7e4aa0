"""Times of a result: medians over the samples of a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from espalier.harness.engine.record import SampleRecord


def answered_together(records: Sequence[SampleRecord]) -> int:
    """Return how many answers came from a pass shared by several runs; they have no times."""
    return sum(bool(record.shared) and not record.times_ms for record in records)


def time_medians(records: Sequence[SampleRecord]) -> dict[str, float | None]:
    """Return the median milliseconds per sample of each phase; None for a phase that never ran."""
    names = {
        "vision_ms": "vision",
        "select_ms": "select",
        "prefill_ms": "prefill",
        "decode_ms_per_token": "decode_per_token",
    }
    medians: dict[str, float | None] = {}
    for name, phase in names.items():
        times = [record.times_ms[phase] for record in records if phase in record.times_ms]
        medians[name] = median(times) if times else None
    return medians
