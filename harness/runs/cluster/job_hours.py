"""Time of one job on GPUs of a kind: start, loading and the work of its cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from espalier.harness.cost.parameter_count import weight_bytes
from espalier.harness.runs.cluster.cost_estimate import CellCost
from espalier.harness.runs.cluster.gpu_kinds import GpuKind, reached
from espalier.harness.runs.cluster.resources import gpus_for, models_of
from espalier.harness.runs.cluster.span import Span
from espalier.harness.specs.run_spec import RunSpec


@dataclass(frozen=True)
class JobHours:
    """Seconds of a job from its start to its end, and the GPUs that it holds."""

    seconds: Span
    gpus: int

    @classmethod
    def of(cls, spec: RunSpec, gpus: int, costs: Iterable[CellCost], gpu: GpuKind) -> JobHours:
        """Return the time of a job.

        Args:
            spec: of one of its cells, which share a model.
            gpus: of the job at least; more where the memory of this kind is too small.
            costs: of its cells.
            gpu: the kind.
        """
        rates, models = reached(), models_of(spec)
        weights = sum(weight_bytes(model.facts, model.dtype) for model in models)
        needed = sum(gpus_for(model.facts, model.dtype, gpu.memory) for model in models)
        work = (cost.seconds(gpu) for cost in costs)
        seconds = Span.total((rates.start, rates.loading.times(weights), *work))
        return cls(seconds, max(gpus, needed))

    @property
    def minutes(self) -> Span:
        """Minutes from start to end."""
        return self.seconds.times(1 / 60)

    @property
    def gpu_hours(self) -> Span:
        """Hours of all its GPUs."""
        return self.seconds.times(self.gpus / 3600)


def hours_text(hours: Span) -> str:
    """Return a span of GPU-hours as text: `2.1 to 14 GPU-hours`."""
    low, high = (f"{bound:,.0f}" if bound >= 100 else f"{bound:.2g}" for bound in hours)
    return f"{low} to {high} GPU-hours"
