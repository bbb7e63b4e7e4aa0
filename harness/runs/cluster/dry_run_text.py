"""The lines of a dry run."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from espalier.harness.kinds.method_stack import label_of
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.cost_estimate import BYTES_PER_SECOND, LEAST_SECONDS, Cost
from espalier.harness.runs.cluster.job_groups import Pack
from espalier.harness.specs.run_spec import RunSpec

if TYPE_CHECKING:
    from espalier.harness.runs.cluster.cluster_sweep import Cell

#: Columns of a line.
WIDTH = 120


def grid(specs: Sequence[RunSpec]) -> Iterator[str]:
    """Yield how many cells there are, and each model's methods, ratios and benchmarks."""
    models = dict.fromkeys(spec.model.name for spec in specs)
    yield f"{_count(len(specs), 'cell')} of {_count(len(models), 'model')}"
    for model in models:
        own = [spec for spec in specs if spec.model.name == model]
        yield f"model {model}: {_count(len(own), 'cell')}"
        axes = {
            "methods": (_method(spec) for spec in own),
            "ratios": (f"{spec.budget.ratio:g}" for spec in own),
            "budgets": (spec.budget.rule for spec in own),
            "benchmarks": (_benchmark(spec) for spec in own),
        }
        for title, values in axes.items():
            yield from _wrapped(f"  {title:<11}", ", ".join(dict.fromkeys(values)))


def carried_out(cluster: ClusterSpec) -> str:
    """Return how jobs are made of cells."""
    if cluster.name == "local":
        return "cluster=local: in this process, one model after the other"
    most = _count(cluster.cells_per_job, "cell")
    return f"cluster={cluster.name}, cluster.cells_per_job: at most {most}"


def job(number: int, one: Pack[Any], costs: Sequence[Cost], cluster: ClusterSpec) -> str:
    """Return the line of a job: its model, cells, resources and cost."""
    asked = one.resources
    parts = [
        f"job {number}: {one.model}, {_count(len(one.cells), 'cell')}",
        f"{_count(asked.gpus, 'GPU')}, {_count(asked.cpus, 'CPU')}, {asked.memory / 2**30:.1f} GiB, "
        f"{asked.minutes} min" + ("" if asked.partition is None else f", {asked.partition}"),
    ]
    if costs:
        flops = sum(cost.flops for cost in costs)
        hours = sum(cost.seconds(cluster.flops_per_second) for cost in costs) / 3600
        spent = f", {_hours(hours * asked.gpus, costs)}" if asked.gpus else ""
        parts.append(f"{_flops(flops)}{spent}")
        if asked.gpus and 60 * hours > asked.minutes:
            parts.append("longer than its time limit: goes on in the queue's next turn")
    return "; ".join(parts)


def cells(specs: Iterable[RunSpec]) -> Iterator[str]:
    """Yield cells, a line for each method and ratio with its benchmarks."""
    found: dict[str, list[str]] = {}
    for spec in specs:
        found.setdefault(f"{_method(spec)} {spec.budget.ratio:g}", []).append(_benchmark(spec))
    for name, benchmarks in found.items():
        yield from _wrapped(f"    {name}: ", ", ".join(dict.fromkeys(benchmarks)))


def estimate(
    counted: Sequence[tuple[Cell, Cost]], unknown: Sequence[str], cluster: ClusterSpec
) -> Iterator[str]:
    """Yield the sum of all costs, what was assumed, and what is not in it."""
    if counted:
        flops = sum(cost.flops for _, cost in counted)
        hours = sum(
            cost.seconds(cluster.flops_per_second) * cell.resources.gpus / 3600
            for cell, cost in counted
        )
        costs = [cost for _, cost in counted]
        without = sum(not cell.resources.gpus for cell, _ in counted)
        yield (
            f"estimate: {_flops(flops)}, {_hours(hours, costs)}, of {_count(len(counted), 'cell')}"
            + (f", {without} of them without a GPU" if without else "")
        )
        tokens = dict.fromkeys(f"{cell.spec.model.name} {cost.visual}" for cell, cost in counted)
        texts = sorted({cost.text for _, cost in counted})
        assumed = (
            f"{cluster.flops_per_second:g} FLOP/s of a GPU over its whole job (cluster.flops_per_second); FLOPs are "
            "the language model's prefill alone, what rows call flops.prefill_exact, or all steps of a denoised "
            f"answer; {_reading(costs)}all GPUs of a job count while one works; visual tokens of a picture by "
            f"model.facts.visual_tokens: {', '.join(tokens)}; "
            f"{', '.join(map(str, texts))} other tokens in a prompt"
        )
        yield from _wrapped("assumed: ", assumed)
    for reason, count in Counter(unknown).items():
        yield f"not counted, unknown offline: {reason} ({_count(count, 'cell')})"


def _method(spec: RunSpec) -> str:
    return f"{spec.method.title} {label_of(spec)}".strip()


def _benchmark(spec: RunSpec) -> str:
    limit = spec.benchmark.limit
    return spec.benchmark.name if limit is None else f"{spec.benchmark.name}[{limit}]"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _hours(hours: float, costs: Sequence[Cost]) -> str:
    """Return GPU-hours with what they leave out."""
    without = sum(cost.decoding is None for cost in costs)
    if without:
        some = "" if without == len(costs) else f" in {without} of {_count(len(costs), 'cell')}"
        return f"{hours:.3g} GPU-hours (decoding not counted{some})"
    longest = " (answers as long as they may be)" if any(cost.longest for cost in costs) else ""
    return f"{hours:.3g} GPU-hours{longest}"


def _reading(costs: Sequence[Cost]) -> str:
    if not any(cost.decoding for cost in costs):
        return ""
    return (
        f"a token of a batch reads the decoder's weights at {BYTES_PER_SECOND:g} B/s and takes {LEAST_SECONDS:g} s at "
        "least; "
    )


def _flops(flops: float) -> str:
    """Return FLOPs with three digits and the unit that suits them."""
    units = ("", "K", "M", "G", "T", "P", "E")
    power = min(int(math.log10(flops) // 3), len(units) - 1) if flops else 0
    return f"{flops / 1000**power:.3g} {units[power]}FLOPs"


def _wrapped(head: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
