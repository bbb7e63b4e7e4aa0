"""Times and costs of a result: medians and means over the samples of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import Any

from espalier.harness.engine.record import SampleRecord
from espalier.harness.specs.run_spec import METERS


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


def cost_means(records: Sequence[SampleRecord]) -> dict[str, dict[str, Any]]:
    """Return what an answer costs by each meter that was on: mean per answer with the meter's error, and per token.

    The error is a standard error that comes from the meter alone, not from differences between samples.
    """
    means: dict[str, dict[str, Any]] = {}
    for name, meter in METERS.items():
        counted = [record for record in records if name in record.costs]
        if not counted:
            continue
        total = sum(record.costs[name] for record in counted)
        variance = sum(record.costs[f"{name}_variance"] for record in counted)
        means[name] = {
            "unit": meter.unit,
            "answers": len(counted),
            "mean": total / len(counted),
            "error": sqrt(variance) / len(counted),
            "per_token": total / sum(record.new_tokens for record in counted),
        }
    return means
