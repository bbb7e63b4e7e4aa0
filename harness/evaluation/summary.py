"""What a row says about cost: means of counts and medians of times over the samples of a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from harness.engine.record import Record


def token_means(records: Sequence[Record]) -> dict[str, float]:
    """Return the means of visual tokens, kept tokens, layer average and KV entries.

    Kept tokens, requested and real, are those after the last site; a method without sites keeps
    all.
    """
    return {
        "visual": fmean(record.visual for record in records),
        "requested_keep": fmean((record.requested or (record.visual,))[-1] for record in records),
        "kept_final": fmean((record.kept or (record.visual,))[-1] for record in records),
        "layer_average": fmean(fmean(record.entering) for record in records),
        "kv_entries": fmean(record.kv_entries for record in records),
    }


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
