"""`run.py ... --dry`: the grid, what the store has of it, the jobs and their cost. Runs and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from espalier.harness.config.compose import Command
from espalier.harness.engine.artifacts.fitprune_schemes import with_scheme
from espalier.harness.errors import Refused, UserError
from espalier.harness.kinds.lookup import as_reducer, kind_of
from espalier.harness.kinds.method_stack import method_of
from espalier.harness.ranks import Ranks
from espalier.harness.runs import streams
from espalier.harness.runs.cluster import dry_run_text as wording
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.cluster_sweep import Cell, cells_of
from espalier.harness.runs.cluster.cost_estimate import Cost, Unknown, cost_of
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
    yield from wording.grid([one.cell.spec for one in planned])
    runs = {one.run: one for one in planned}.values()
    counts = {status: sum(one.status == status for one in runs) for status in STATUSES}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    yield f"runs in {planned[0].cell.spec.store}: {told}"
    yield from _problems(planned)
    jobs = jobs_of(planned, cluster)
    if jobs:
        yield f"jobs: {len(jobs)} ({wording.carried_out(cluster)})"
    for number, job in enumerate(jobs):
        costs = [one.cost for one in job.cells if one.cost is not None]
        yield wording.job(number, job, costs, cluster)
        yield from wording.cells([one.cell.spec for one in job.cells])
    yield from wording.estimate(
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
                yield from wording.cells([one.cell.spec for one in cells])
