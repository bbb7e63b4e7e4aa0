"""`run.py ... --dry`: print the grid, finished cells, the jobs and their cost, without running anything."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from espalier.harness.engine.artifacts import with_scheme
from espalier.harness.errors import Refused, UserError, print_lines
from espalier.harness.kinds.lookup import kind_of, label_of, method_of
from espalier.harness.ranks import Ranks
from espalier.harness.runs import streams
from espalier.harness.runs.admission import admit_here
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.cost_estimate import (
    CellCost,
    JobHours,
    UnknownCost,
    cost_of,
    hours_text,
)
from espalier.harness.runs.cluster.gpu_kinds import GpuKind, Span
from espalier.harness.runs.cluster.launched_jobs import JobGroup, group_cells
from espalier.harness.runs.runner import Runner
from espalier.harness.runs.status_line import StatusLine
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Method, MethodError, TokenReducer

if TYPE_CHECKING:
    from espalier.harness.runs.cluster.cluster_sweep import ClusterCell


@dataclass(frozen=True)
class PlannedCell:
    """A cell, and the information available without running it.

    Attributes:
        cell: the composed cell.
        run: its run key, or a substitute if that cannot be computed here.
        status: `done`, `begun`, `to do` or `refused`.
        problem: the reason if it is refused, or an input that is missing on this machine; else None.
        cost: its estimated cost; None: see `unknown`.
        unknown: why the cost cannot be estimated.
    """

    cell: ClusterCell
    run: str
    status: str
    problem: str | None = None
    cost: CellCost | None = None
    unknown: str | None = None

    @property
    def would_run(self) -> bool:
        """Whether it would run."""
        return self.status in ("to do", "begun")


def list_cells(cells: Sequence[ClusterCell], cluster: ClusterSpec, waiting: StatusLine) -> int:
    """Print the runs of a command without running them, and return the exit code."""
    planned, digests, runner = [], Digests(), Runner()
    for number, cell in enumerate(cells, 1):
        waiting.say(f"checking cell {number} of {len(cells)}")
        planned.append(plan(cell, digests, runner, cluster))
    waiting.clear()
    with streams.output():
        print_lines(*lines_of(planned, cluster))
    return 0


def plan(cell: ClusterCell, digests: Digests, runner: Runner, cluster: ClusterSpec) -> PlannedCell:
    """Return the plan of a cell. Cost: that of its checks; weights that have a checksum are read once."""
    try:
        job = admit_here(cell.spec, Ranks(), digests, places=False)
    except Refused as error:
        return PlannedCell(cell, repr(cell.spec), "refused", str(error))
    except UserError as error:
        return _plan_without_inputs(cell, digests, str(error), cluster)
    planned = PlannedCell(cell, job.key, "to do", None, *_costs(job.spec, job.method, cluster))
    if runner.stored(job) is not None:
        return replace(planned, status="done")
    directory = RunDir(job.spec.store / "runs" / job.key)
    journal = directory.forced if job.spec.force else directory.journal
    return replace(planned, status="begun" if len(journal) else "to do")


def _plan_without_inputs(
    cell: ClusterCell, digests: Digests, problem: str, cluster: ClusterSpec
) -> PlannedCell:
    """Return the plan, from the model's facts, of a cell with missing inputs on this machine."""
    spec, name = cell.spec, cell.spec.method.name
    try:
        method = method_of(spec.method)
        spec = kind_of(method, spec).normalise(spec, method)
        if isinstance(method, TokenReducer) and method.in_one_prefill:
            method = with_scheme(spec.model, method, name, digests, spec.store)
        costs = _costs(spec, method, cluster)
    except (Refused, MethodError) as error:
        return PlannedCell(cell, repr(spec), "refused", str(error))
    except UserError as error:
        costs = None, f"method {name}: {error}"
    return PlannedCell(cell, repr(spec), "to do", problem, *costs)


def _costs(
    spec: RunSpec, method: Method, cluster: ClusterSpec
) -> tuple[CellCost | None, str | None]:
    try:
        return cost_of(spec, method, cluster.answer_tokens), None
    except UnknownCost as error:
        return None, str(error)


def jobs_of(planned: Iterable[PlannedCell], cluster: ClusterSpec) -> list[JobGroup[PlannedCell]]:
    """Return the jobs of the cells that would run; cells of one run count once."""
    would_run = {entry.run: entry for entry in reversed(list(planned)) if entry.would_run}
    limit = len(would_run) if cluster.name == "local" else cluster.cells_per_job
    return group_cells(
        [
            (
                entry.cell.spec.model.name,
                repr(entry.cell.spec.model),
                entry.cell.resources,
                entry,
            )
            for entry in reversed(would_run.values())
        ],
        max(limit, 1),
    )


def lines_of(planned: Sequence[PlannedCell], cluster: ClusterSpec) -> Iterator[str]:
    """Yield the printed lines."""
    yield from grid_lines([cell.cell.spec for cell in planned])
    runs = {cell.run: cell for cell in planned}.values()
    counts = {status: sum(cell.status == status for cell in runs) for status in STATUSES}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    yield f"runs in {planned[0].cell.spec.store}: {summary}"
    yield from _problems(planned)
    jobs = jobs_of(planned, cluster)
    if jobs:
        yield f"jobs: {len(jobs)} ({grouping(cluster)})"
    for number, job in enumerate(jobs):
        yield job_line(number, job, cluster)
        yield from cell_lines([cell.cell.spec for cell in job.cells])
    yield from estimate_lines(jobs, cluster)


STATUSES = ("done", "begun", "to do", "refused")


def _problems(planned: Sequence[PlannedCell]) -> Iterator[str]:
    refused = planned[0].cell.spec.refused
    titles = {
        True: "cannot run, and is left out"
        if refused == "skip"
        else "cannot run, and stops the command (refused=skip leaves it out)",
        False: "missing on this machine",
    }
    for left_out, title in titles.items():
        by_reason: dict[str, list[PlannedCell]] = {}
        for cell in planned:
            if cell.problem is not None and (cell.status == "refused") is left_out:
                by_reason.setdefault(cell.problem, []).append(cell)
        for reason, cells in by_reason.items():
            yield f"{title}: {reason} ({len(cells)} of the cells)"
            if left_out:
                yield from cell_lines([cell.cell.spec for cell in cells])


#: Columns of a line.
WIDTH = 120


def grid_lines(specs: Sequence[RunSpec]) -> Iterator[str]:
    """Yield the number of cells, and each model's methods, ratios and benchmarks."""
    models = dict.fromkeys(spec.model.name for spec in specs)
    yield f"{_count(len(specs), 'cell')} of {_count(len(models), 'model')}"
    for model in models:
        model_specs = [spec for spec in specs if spec.model.name == model]
        yield f"model {model}: {_count(len(model_specs), 'cell')}"
        axes = {
            "methods": (_method(spec) for spec in model_specs),
            "ratios": (spec.budget.amount for spec in model_specs),
            "budgets": (spec.budget.rule for spec in model_specs),
            "benchmarks": (_benchmark(spec) for spec in model_specs),
        }
        for title, values in axes.items():
            yield from _wrapped(f"  {title:<11}", ", ".join(dict.fromkeys(values)))


def grouping(cluster: ClusterSpec) -> str:
    """Return how cells are grouped into jobs, as text."""
    if cluster.name == "local":
        return "cluster=local: in this process, one model after the other"
    limit = _count(cluster.cells_per_job, "cell")
    return f"cluster={cluster.name}, cluster.cells_per_job: at most {limit}"


def job_line(number: int, group: JobGroup[PlannedCell], cluster: ClusterSpec) -> str:
    """Return the line of a job: its model, cells, resources and cost."""
    resources = group.resources
    parts = [
        f"job {number}: {group.model}, {_count(len(group.cells), 'cell')}",
        f"{_count(resources.gpus, 'GPU')}, {_count(resources.cpus, 'CPU')}, {resources.memory / 2**30:.1f} GiB, "
        f"{resources.minutes} min"
        + ("" if resources.partition is None else f", {resources.partition}"),
    ]
    costs = costs_of([group])
    if costs:
        parts.append(_flops(sum(cost.flops + cost.tower for cost in costs)))
    if costs and resources.gpus:
        jobs = [job_hours(group, gpu) for gpu in cluster.estimated_gpus.values()]
        hours = Span.around(job.gpu_hours for job in jobs)
        parts[-1] += f", {hours_text(hours)}{_without_answers(costs)}"
        minutes = Span.around(job.minutes for job in jobs)
        if minutes.high > resources.minutes:
            verb = "is" if minutes.low > resources.minutes else "may be"
            parts.append(f"{verb} longer than its time limit: continues in the queue's next turn")
    return "; ".join(parts)


def costs_of(jobs: Iterable[JobGroup[PlannedCell]]) -> list[CellCost]:
    """Return the known costs of the cells of jobs."""
    return [cell.cost for job in jobs for cell in job.cells if cell.cost is not None]


def job_hours(group: JobGroup[PlannedCell], gpu: GpuKind) -> JobHours:
    """Return the time of a job on GPUs of a kind."""
    return JobHours.of(group.cells[0].cell.spec, group.resources.gpus, costs_of([group]), gpu)


def cell_lines(specs: Iterable[RunSpec]) -> Iterator[str]:
    """Yield cells, a line for each method and ratio with its benchmarks."""
    by_method: dict[str, list[str]] = {}
    for spec in specs:
        by_method.setdefault(f"{_method(spec)} {spec.budget.amount}", []).append(_benchmark(spec))
    for name, benchmarks in by_method.items():
        yield from _wrapped(f"    {name}: ", ", ".join(dict.fromkeys(benchmarks)))


def estimate_lines(jobs: Sequence[JobGroup[PlannedCell]], cluster: ClusterSpec) -> Iterator[str]:
    """Yield the sum of all costs, by GPU, the assumptions, and the costs not included."""
    costs = costs_of(jobs)
    if costs:
        yield from _sums(jobs, costs, cluster)
        yield from _wrapped("assumed: ", _assumptions(jobs, costs))
    cells = [cell for job in jobs for cell in job.cells]
    missing = (cell.cost.missing for cell in cells if cell.cost and cell.cell.resources.gpus)
    unknown = [cell.unknown for cell in cells if cell.unknown is not None]
    for reason, count in Counter([*filter(None, missing), *unknown]).items():
        yield f"not counted, unknown offline: {reason} ({_count(count, 'cell')})"


def _sums(
    jobs: Sequence[JobGroup[PlannedCell]], costs: Sequence[CellCost], cluster: ClusterSpec
) -> Iterator[str]:
    with_gpu = [job for job in jobs if job.resources.gpus and costs_of([job])]
    without = len(costs) - len(costs_of(with_gpu))
    tokens = Span.total(cost.answer_tokens for cost in costs)
    parts = [
        f"{_flops(sum(cost.flops for cost in costs))} of the language model",
        f"{_flops(sum(cost.tower for cost in costs))} of the vision tower",
        *([f"{_tokens(tokens)} tokens of answers"] if tokens.high else []),
    ]
    yield (
        f"estimate: {', '.join(parts)}, of {_count(len(costs), 'cell')}"
        + (f", {without} of them without a GPU" if without else "")
    )
    if with_gpu:
        for name, gpu in cluster.estimated_gpus.items():
            hours = Span.total(job_hours(job, gpu).gpu_hours for job in with_gpu)
            yield f"  {name}: {hours_text(hours)}{_without_answers(costs_of(with_gpu))}"


def _assumptions(jobs: Sequence[JobGroup[PlannedCell]], costs: Sequence[CellCost]) -> str:
    counted = [cell for job in jobs for cell in job.cells if cell.cost is not None]
    tokens = dict.fromkeys(
        f"{cell.cell.spec.model.name} {cell.cost.visual}" for cell in counted if cell.cost
    )
    texts = sorted({cost.text for cost in costs})
    return (
        "peaks of GPUs and the shares of them that runs reach by conf/gpus.yaml (cluster.gpu_kinds adds to it); "
        "lengths of answers by conf/answer_lengths.yaml or the generation settings (cluster.answer_tokens overrides "
        "them); weights are loaded once a job; all GPUs of a job count while one works; visual tokens of a picture by "
        f"model.facts.visual_tokens: {', '.join(tokens)}; {', '.join(map(str, texts))} other tokens in a prompt; "
        "scoring, judges and the preparation of pictures are not counted"
    )


def _method(spec: RunSpec) -> str:
    return f"{spec.method.title} {label_of(spec)}".strip()


def _benchmark(spec: RunSpec) -> str:
    limit = spec.benchmark.limit
    return spec.benchmark.name if limit is None else f"{spec.benchmark.name}[{limit}]"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _without_answers(costs: Sequence[CellCost]) -> str:
    """Return a note on answers that are not included; empty if all are."""
    without = sum(bool(cost.missing) for cost in costs)
    if not without:
        return ""
    part = "" if without == len(costs) else f" in {without} of {_count(len(costs), 'cell')}"
    return f" (decoding not counted{part})"


def _tokens(tokens: Span) -> str:
    bounds = dict.fromkeys(f"{bound:,.0f}" for bound in tokens)
    return " to ".join(bounds)


def _flops(flops: float) -> str:
    """Return FLOPs with three digits and a suitable unit."""
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
