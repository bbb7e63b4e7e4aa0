"""The row of a run: the schema of the last line of run.py, filled from the measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.facts import OF_CLASS_TOKEN, SUBSTITUTES
from espalier.harness.cost.memory import Peak
from espalier.harness.evaluation.metered import answered_together, cost_means, time_medians
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.signal_check import signals_of
from espalier.harness.specs.generation import spoken
from espalier.harness.specs.plugins.installed import plugins_of
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import SCHEMA
from espalier.harness.store.row_text import too_many

if TYPE_CHECKING:
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.evaluation.evaluate import Evaluation
    from espalier.harness.evaluation.samples import Sample
    from espalier.harness.runs.admission import Job


#: Why a row with layers in the host's memory has no times.
OFFLOADED = "model.offload=true: layers are copied from the host for each token"

#: What FLOPs of quantised weights are.
PACKED = "of the unpacked matrices, in any precision; unpacking is not counted"


def build_row(
    job: Job, evaluation: Evaluation, peak: Peak, environment: Mapping[str, Any], status: str
) -> dict[str, Any]:
    """Return the row of a finished run: means over samples for tokens, medians for times.

    Raises:
        BudgetMismatch: a sample kept another number of tokens than its budget requests.
    """
    spec = job.spec
    records = [sample.record for sample in evaluation.samples]
    kind = kind_of(job.method, spec)
    account = kind.account(spec, job.method, records)
    together, budget = answered_together(records), spec.budget
    times, costs = time_medians(records), cost_means(records)
    counted_share, clipped = {}, {}
    if budget.count is not None:
        # The share of all samples' visual tokens that the count removes, and the samples that have fewer tokens.
        visual = sum(record.visual for record in records)
        kept = sum(budget.target(record.visual) for record in records)
        counted_share = {"ratio": 1 - kept / visual if visual else 0.0}
        clipped = {"clipped": sum(budget.clips(record.visual) for record in records)}
    return {
        "schema": SCHEMA,
        "status": status,
        "run_key": job.key,
        **job.parts["cell"],
        **counted_share,
        "n_samples": evaluation.n_samples,
        "metrics": {name: _reported(spec, values) for name, values in evaluation.metrics.items()},
        "tokens": dict(account.tokens),
        "flops": dict(account.flops),
        "time": dict.fromkeys(times) if spec.model.offload else times,
        "memory": {
            "kv_bytes": account.kv_bytes,
            "peak_bytes": None if together or spec.backend.served else peak.bytes,
        },
        # The block that the key was computed from.
        "settings": job.parts["settings"],
        "extra": {
            "label": job.label,
            "params": dict(kind.identity(spec, job.method).params),
            "headline": spec.benchmark.headline,
            "higher_is_better": spec.benchmark.higher_is_better,
            **account.extra,
            **clipped,
            "substitutes": _substitutes(job),
            "time_iqr": _spreads(records),
            **({"costs": costs} if costs else {}),
            "new_tokens": fmean(record.new_tokens for record in records),
            "text_tokens": fmean(record.text for record in records),
            **_reasoning(evaluation.samples),
            "samples_per_second": evaluation.samples_per_second,
            "reading_ms": None if evaluation.reading_ms is None else dict(evaluation.reading_ms),
            "resumed_samples": evaluation.resumed,
            "failures": [str(failure) for failure in evaluation.failures],
            "unparsed": evaluation.unparsed,
            "unread": too_many(evaluation.unparsed, evaluation.n_samples),
            "aggregation": {name: dict(values) for name, values in evaluation.aggregation.items()},
            **({} if evaluation.judge is None else {"judge": dict(evaluation.judge)}),
            **({} if evaluation.latency is None else {"latency": dict(evaluation.latency)}),
            **_plugins(job),
            "speedup": evaluation.speedup,
            "speedup_note": evaluation.speedup_note,
            "peak_note": peak.note
            + ("; judging by the whole model included" if spec.engine.rescore else ""),
            **_one_pass(together),
            **({"untimed": OFFLOADED} if spec.model.offload else {}),
            **({"flops_note": PACKED} if "quantisation" in job.parts["settings"]["model"] else {}),
            **({"peak_note": "of another process"} if spec.backend.served else {}),
            "prompt": dict(evaluation.prompt),
            "task_versions": dict(evaluation.versions),
            "environment": dict(environment),
        },
    }


def _reasoning(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return the mean tokens of reasoning, and the samples that end within it; nothing if no answer reasons."""
    lengths = [sample.reasoning for sample in samples]
    if not any(lengths):
        return {}
    unclosed = sum(bool(sample.reasoning) and not spoken(sample.answer) for sample in samples)
    return {"reasoning": {"tokens": fmean(lengths), "unclosed": unclosed}}


def _plugins(job: Job) -> dict[str, Any]:
    """Return the blocks about the code of users, and the places of their methods; nothing if there is none."""
    spec = job.spec
    used = plugins_of(spec.classes, spec.benchmark.include_path)
    digests = job.parts.get("plugins", ())
    plugins = [
        {"name": plugin.title, "digest": digest}
        for plugin, digest in zip(used, digests, strict=True)
    ]
    parts = (spec.method, spec.method.compressor)
    code = {part.name: part.code for part in parts if part is not None and part.code is not None}
    return {**({"plugins": plugins} if plugins else {}), **({"code": code} if code else {})}


def _one_pass(together: int) -> dict[str, Any]:
    """Return the blocks about answers of a shared pass; nothing if there are none."""
    if not together:
        return {}
    note = (
        f"{together} answers from one pass with other cells (engine.share=prefix): times are those of all other "
        "answers, and there is no peak of its own"
    )
    return {"one_pass": {"samples": together, "note": note}, "peak_note": "none of its own"}


def _spreads(records: Sequence[SampleRecord]) -> dict[str, list[float]]:
    """Return the quartiles [25 %, 75 %] of each phase's time in milliseconds."""
    spreads = {}
    for phase in sorted({phase for record in records for phase in record.times_ms}):
        times = [record.times_ms[phase] for record in records if phase in record.times_ms]
        if len(times) > 1:
            low, _, high = quantiles(times, n=4, method="inclusive")
            spreads[phase] = [low, high]
    return spreads


def _reported(spec: RunSpec, values: Mapping[str, float | None]) -> dict[str, float | None]:
    # Random weights answer at random: such a row has times and memory, never accuracy.
    if spec.benchmark.prompt_tokens is None and spec.model.weights == "random":
        return dict.fromkeys(values)
    # JSON has no NaN; an undefined number is null.
    return {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}


def _substitutes(job: Job) -> dict[str, str]:
    """Return the substitutes of the class token's attention if the method reads it and the tower has none."""
    facts = job.spec.model.facts
    if facts.class_attention == "token":
        return {}
    read = signals_of(job.method, facts)
    return {
        name: SUBSTITUTES[facts.class_attention]
        for name in sorted(OF_CLASS_TOKEN.intersection(read))
    }
