"""Answers with their costs by the meters of a run (harness/cost/meters/__init__.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from time import perf_counter
from typing import Any

import torch

from espalier.harness.cost.meters import CostMeter, open_meter
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.errors import UserError
from espalier.harness.kinds.kind import Generator
from espalier.harness.specs.run_spec import METERS, ModelSpec, RunSpec

#: Settings under which a call of the generator does more than answer, and what.
EXTRA_WORK = {
    "rescore": "also judges the answer",
    "compare": "also decodes it without a draft",
}


@dataclass(frozen=True)
class MeteredGenerator:
    """Generates with `inner` and records what each batch adds to the meters, in equal shares for its samples.

    A reading that is up to `lag` seconds old, evenly distributed, has a variance of (rate * lag)² / 12; a batch has
    two. Its variance is shared like its cost, so that costs and variances of samples both add up.

    Attributes:
        inner: generates the answers.
        meters: by the name of their setting.
    """

    inner: Generator
    meters: Mapping[str, CostMeter]

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> GeneratedBatch:
        """Return the answers of `inner`."""
        before = {name: meter.read() for name, meter in self.meters.items()}
        started = perf_counter()
        generated = self.inner.generate(inputs, samples, **generation)
        spent = {name: meter.read() - before[name] for name, meter in self.meters.items()}
        seconds, rows = perf_counter() - started, len(generated.records)
        costs = {name: amount / rows for name, amount in spent.items()}
        for name, amount in spent.items():
            error = amount / seconds * self.meters[name].lag
            costs[f"{name}_variance"] = error**2 / 6 / rows
        records = tuple(replace(record, costs=costs) for record in generated.records)
        return replace(generated, records=records)


def open_meters(spec: RunSpec) -> dict[str, CostMeter]:
    """Return the open meters of a run, of all devices of its model and its draft.

    Raises:
        UserError: a meter cannot count on this machine.
    """
    models = [spec.model] if spec.method.draft is None else [spec.model, spec.method.draft]
    devices = [name for model in models for name in _devices(model)]
    return {name: open_meter(name, devices) for name in spec.engine.meters}


def _devices(model: ModelSpec) -> list[str]:
    if model.device_map is None:
        return [model.device]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def check_meters(engine: Mapping[str, Any], meters: Sequence[str]) -> None:
    """Refuse meters where a run does more than answer while they count.

    Args:
        engine: the settings that concern the run's method.
        meters: names of those that are on.

    Raises:
        UserError: an answer is judged or decoded twice.
    """
    for setting, work in EXTRA_WORK.items():
        if meters and engine.get(setting):
            raise UserError(
                f"engine.{meters[0]}=true counts what an answer costs, and engine.{setting}=true {work}; "
                f"valid: engine.{setting}=false"
            )


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
