"""One run as one row: the contract of the last line of run.py, filled from what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any

from harness.admission.signals import signals_of
from harness.decoding.summary import speculative_block
from harness.evaluation.rescore import acceptance
from harness.facts import OF_CLASS_TOKEN, SUBSTITUTES
from harness.labels import label_of
from harness.measure.flops import SampleFlops, flops_block, sample_flops
from harness.measure.memory import Peak
from harness.measure.work import Work
from harness.running.preflight import Job
from harness.specs import RunSpec
from harness.store import SCHEMA
from methods.base import Decoder

if TYPE_CHECKING:
    from harness.engine.record import Record
    from harness.evaluation.evaluate import Evaluation


def build_row(
    job: Job, evaluation: Evaluation, peak: Peak, environment: Mapping[str, Any], status: str
) -> dict[str, Any]:
    """Return the row of a finished run: means over samples for tokens, medians for times.

    Raises:
        BudgetMismatch: a sample kept another number of tokens than its budget asked for.
    """
    spec = job.spec
    records = [sample.record for sample in evaluation.samples]
    return {
        "schema": SCHEMA,
        "status": status,
        "run_key": job.key,
        **job.parts["cell"],
        "n_samples": evaluation.n_samples,
        "metrics": {name: _reported(spec, values) for name, values in evaluation.metrics.items()},
        "tokens": evaluation.tokens | {"positions": _positions(records)},
        "flops": flops_block(_flops(job, record) for record in records),
        "time": evaluation.time,
        "memory": {"kv_bytes": evaluation.kv_bytes, "peak_bytes": peak.bytes},
        # The very block that the key was computed from.
        "settings": job.parts["settings"],
        "extra": {
            "label": label_of(spec),
            "params": asdict(job.method),
            "headline": spec.benchmark.headline,
            "higher_is_better": spec.benchmark.higher_is_better,
            "sites": _sites(job, records),
            "adaptive": job.reducer.adaptive,  # then `kept` is the method's own, sample by sample
            "decode_attended": _attended(records),
            "spare": _spare(records),
            "acceptance": acceptance(records),
            "speculative": _speculative(job, records),
            "achieved": _achieved(job, records),
            "substitutes": _substitutes(job),
            "time_iqr": _spreads(records),
            "new_tokens": fmean(record.new_tokens for record in records),
            "text_tokens": fmean(record.text for record in records),
            "samples_per_second": evaluation.samples_per_second,
            "resumed_samples": evaluation.resumed,
            "failures": [str(failure) for failure in evaluation.failures],
            "speedup": evaluation.speedup,
            "speedup_note": evaluation.speedup_note,
            "peak_note": peak.note
            + ("; judging by the whole model included" if spec.engine.rescore else ""),
            "prompt": dict(evaluation.prompt),
            "task_versions": dict(evaluation.versions),
            "environment": dict(environment),
        },
    }


def outline(job: Job) -> dict[str, Any]:
    """Return what is known of a row before its run: the cell, with the samples asked for, and the settings."""
    return {
        **job.parts["cell"],
        "n_samples": job.spec.benchmark.limit,
        "settings": job.parts["settings"],
        "extra": {"label": label_of(job.spec)},
    }


def _flops(job: Job, record: Record) -> SampleFlops:
    facts, work = job.spec.model.facts, Work(*record.work)
    return sample_flops(facts, record.entering, record.visual, record.text, work)


def _achieved(job: Job, records: Sequence[Record]) -> dict[str, float]:
    """Verify the budget of every sample; return the mean equivalent tokens under each rule."""
    facts, budget = job.spec.model.facts, job.spec.budget
    found = [asdict(budget.verify(job.reducer, facts, record)) for record in records]
    return {rule: fmean(one[rule] for one in found) for rule in found[0]}


def _sites(job: Job, records: Sequence[Record]) -> list[dict[str, Any]]:
    facts = job.spec.model.facts
    sites = job.reducer.all_sites(facts.tower.layers, facts.text.layers)
    return [
        {
            "where": site.where,
            "layer": site.layer,
            "requested": fmean(record.requested[place] for record in records),
            "kept": fmean(record.kept[place] for record in records),
        }
        for place, site in enumerate(sites)
    ]


def _spare(records: Sequence[Record]) -> float | None:
    """Return the mean tokens that only filled up the count; None if the method never has to."""
    found = [record.spare for record in records if record.spare is not None]
    return fmean(found) if found else None


def _speculative(job: Job, records: Sequence[Record]) -> dict[str, Any] | None:
    """Return how a speculative decoder did; None for other methods."""
    if not isinstance(job.method, Decoder):
        return None
    decodings = [record.decoding for record in records if record.decoding is not None]
    return speculative_block(decodings, job.method.overlap)


def _attended(records: Sequence[Record]) -> float | None:
    """Return the mean visual entries that decoding steps attended to; None if no method chose among them."""
    found = [record.attended for record in records if record.attended is not None]
    return fmean(found) if found else None


def _spreads(records: Sequence[Record]) -> dict[str, list[float]]:
    """Return the quartiles [25 %, 75 %] of each phase's time in milliseconds."""
    phases = sorted({phase for record in records for phase in record.times_ms})
    spreads = {}
    for phase in phases:
        times = [record.times_ms[phase] for record in records if phase in record.times_ms]
        if len(times) > 1:
            low, _, high = quantiles(times, n=4, method="inclusive")
            spreads[phase] = [low, high]
    return spreads


def _reported(spec: RunSpec, values: Mapping[str, float | None]) -> dict[str, float | None]:
    # Random weights answer at random: such a row tells of times and memory, never of accuracy.
    return dict.fromkeys(values) if spec.model.weights == "random" else _finite(values)


def _positions(records: Sequence[Record]) -> float:
    """Return the mean positions of the prompt that images take: visual tokens, newlines and separators."""
    return fmean(record.visual + record.special for record in records)


def _substitutes(job: Job) -> dict[str, str]:
    """Say what stands for the class token's attention if the method reads it and the tower has none."""
    facts = job.spec.model.facts
    if facts.class_attention == "token":
        return {}
    read = signals_of(job.method, facts)
    return {
        name: SUBSTITUTES[facts.class_attention]
        for name in sorted(OF_CLASS_TOKEN.intersection(read))
    }


def _finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    # JSON has no NaN; an undefined number is null.
    return {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}
