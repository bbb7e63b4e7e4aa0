"""What a row says about cost: medians of times over the samples of a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from espalier.harness.engine.record import Record


def answered_together(records: Sequence[Record]) -> int:
    """Return how many answers came from a pass that several runs shared: they have no times of their own."""
    return sum(bool(record.shared) and not record.times_ms for record in records)


def time_medians(records: Sequence[Record]) -> dict[str, float | None]:
    """Return the median milliseconds for one sample of each phase; None if it never ran."""
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
