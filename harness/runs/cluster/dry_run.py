"""`run.py ... --dry`: the grid, what the store has of it, the jobs and their cost. Runs and writes nothing."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from espalier.harness.config.compose import Command
from espalier.harness.engine.artifacts.fitprune_schemes import with_scheme
from espalier.harness.errors import Refused, UserError
from espalier.harness.kinds.lookup import as_reducer, kind_of
from espalier.harness.kinds.method_stack import label_of, method_of
from espalier.harness.ranks import Ranks
from espalier.harness.runs import streams
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.cluster_sweep import Cell, cells_of
from espalier.harness.runs.cluster.cost_estimate import (
    BYTES_PER_SECOND,
    LEAST_SECONDS,
    Cost,
    Unknown,
    cost_of,
)
from espalier.harness.runs.cluster.job_groups import Pack, pack
from espalier.harness.runs.process_checks import check_cell
from espalier.harness.runs.runner import Runner
from espalier.harness.runs.status_line import Waiting
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Method, MethodError


@dataclass(frozen=True)
class Planned:
    """A cell, and what can be told of it without running it.

    Attributes:
        cell: what was composed.
        run: its run key, or what stands for it where that cannot be computed here.
        status: `done`, `begun`, `to do` or `refused`.
        problem: why it is refused; of others, what is missing on this machine; None: nothing.
        cost: what it would cost; None: see `unknown`.
        unknown: why that cannot be told.
    """

    cell: Cell
    run: str
    status: str
    problem: str | None = None
    cost: Cost | None = None
    unknown: str | None = None

    @property
    def ahead(self) -> bool:
        """Whether it would run."""
        return self.status in ("to do", "begun")


def list_cells(command: Command, cluster: ClusterSpec, waiting: Waiting) -> int:
    """Print what a command line would run, and return the exit code."""
    cells = cells_of(command, cluster)
    planned, digests, runner = [], Digests(), Runner()
    for number, cell in enumerate(cells, 1):
        waiting.say(f"checking cell {number} of {len(cells)}")
        planned.append(plan(cell, digests, runner))
    waiting.clear()
    with streams.output():
        for line in lines_of(planned, cluster):
            print(line)
    return 0


def plan(cell: Cell, digests: Digests, runner: Runner) -> Planned:
    """Return what can be told of a cell. Cost: that of its checks; weights that have a checksum are read once."""
    try:
        job = check_cell(cell.spec, Ranks(), digests, places=False)
    except Refused as error:
        return Planned(cell, repr(cell.spec), "refused", str(error))
    except UserError as error:
        return _elsewhere(cell, digests, str(error))
    known = Planned(cell, job.key, "to do", None, *_costs(job.spec, job.method))
    if runner.stored(job) is not None:
        return replace(known, status="done")
    directory = RunDir(job.spec.store / "runs" / job.key)
    journal = directory.forced if job.spec.force else directory.journal
    return replace(known, status="begun" if len(journal) else "to do")


def _elsewhere(cell: Cell, digests: Digests, problem: str) -> Planned:
    """Return what the facts of a model tell of a cell for which something is missing on this machine."""
    spec, name = cell.spec, cell.spec.method.name
    try:
        method = method_of(spec.method)
        spec = kind_of(method).settle(spec, method)
        reducer = as_reducer(method)
        if reducer is not None:
            method = with_scheme(spec.model, reducer, name, digests, spec.store)
        told = _costs(spec, method)
    except (Refused, MethodError) as error:
        return Planned(cell, repr(spec), "refused", str(error))
    except UserError as error:
        told = None, f"method {name}: {error}"
    return Planned(cell, repr(spec), "to do", problem, *told)


def _costs(spec: RunSpec, method: Method) -> tuple[Cost | None, str | None]:
    try:
        return cost_of(spec, method), None
    except Unknown as error:
        return None, str(error)


def jobs_of(planned: Iterable[Planned], cluster: ClusterSpec) -> list[Pack[Planned]]:
    """Return the jobs of the cells that would run; cells of one run are one."""
    ahead = {one.run: one for one in reversed(list(planned)) if one.ahead}
    at_most = len(ahead) if cluster.name == "local" else cluster.cells_per_job
    return pack(
        [
            (one.cell.spec.model.name, repr(one.cell.spec.model), one.cell.resources, one)
            for one in reversed(ahead.values())
        ],
        max(at_most, 1),
    )


def lines_of(planned: Sequence[Planned], cluster: ClusterSpec) -> Iterator[str]:
    """Yield what is printed."""
    yield from grid_lines([one.cell.spec for one in planned])
    runs = {one.run: one for one in planned}.values()
    counts = {status: sum(one.status == status for one in runs) for status in STATUSES}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    yield f"runs in {planned[0].cell.spec.store}: {told}"
    yield from _problems(planned)
    jobs = jobs_of(planned, cluster)
    if jobs:
        yield f"jobs: {len(jobs)} ({carried_out(cluster)})"
    for number, job in enumerate(jobs):
        costs = [one.cost for one in job.cells if one.cost is not None]
        yield job_line(number, job, costs, cluster)
        yield from cell_lines([one.cell.spec for one in job.cells])
    yield from estimate_lines(
        [(one.cell, one.cost) for job in jobs for one in job.cells if one.cost is not None],
        [one.unknown for job in jobs for one in job.cells if one.unknown is not None],
        cluster,
    )


STATUSES = ("done", "begun", "to do", "refused")


def _problems(planned: Sequence[Planned]) -> Iterator[str]:
    refused = planned[0].cell.spec.refused
    titles = {
        True: "cannot run, and is left out"
        if refused == "skip"
        else "cannot run, and stops the command (refused=skip leaves it out)",
        False: "missing on this machine",
    }
    for left_out, title in titles.items():
        found: dict[str, list[Planned]] = {}
        for one in planned:
            if one.problem is not None and (one.status == "refused") is left_out:
                found.setdefault(one.problem, []).append(one)
        for reason, cells in found.items():
            yield f"{title}: {reason} ({len(cells)} of the cells)"
            if left_out:
                yield from cell_lines([one.cell.spec for one in cells])


#: Columns of a line.
WIDTH = 120


def grid_lines(specs: Sequence[RunSpec]) -> Iterator[str]:
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


def job_line(number: int, one: Pack[Any], costs: Sequence[Cost], cluster: ClusterSpec) -> str:
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


def cell_lines(specs: Iterable[RunSpec]) -> Iterator[str]:
    """Yield cells, a line for each method and ratio with its benchmarks."""
    found: dict[str, list[str]] = {}
    for spec in specs:
        found.setdefault(f"{_method(spec)} {spec.budget.ratio:g}", []).append(_benchmark(spec))
    for name, benchmarks in found.items():
        yield from _wrapped(f"    {name}: ", ", ".join(dict.fromkeys(benchmarks)))


def estimate_lines(
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
