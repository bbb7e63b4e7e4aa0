"""A command with cells that run as jobs: group, start and watch the jobs, then report from the store.

Each command has its own folder, `<store>/cluster/<sweep>`, with a file for each job. Only the row of a cell shows that
it is finished: a job may be COMPLETED and have failed, or be killed after its last row.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.config import composer as composed
from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.cell_settings import NOT_OF_A_RUN
from espalier.harness.config.compose import Command
from espalier.harness.errors import StoreLost
from espalier.harness.paths import short_path
from espalier.harness.runs import streams
from espalier.harness.runs.admission import Job
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.job_file import (
    JobCell,
    JobFile,
    JobGroup,
    Launcher,
    LeftOut,
    group_cells,
    row_time,
)
from espalier.harness.runs.cluster.job_monitor import Jobs, watch
from espalier.harness.runs.cluster.local_workers import LocalWorkers, devices
from espalier.harness.runs.cluster.resources import Resources, on_its_machine, resources_of
from espalier.harness.runs.cluster.slurm import Slurm
from espalier.harness.runs.runner import Runner
from espalier.harness.runs.status_line import StatusLine
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from espalier.harness.store.files import durable
from espalier.harness.store.files.folder_checks import below

#: Settings of a job: it draws nothing, and skips cells that cannot run on its machine.
OF_A_JOB = {"curves": None, "report": None, "refused": "skip", "json": True}


@dataclass(frozen=True)
class ClusterCell:
    """A cell of a command: its composed config, its run, and the resources of its job."""

    config: composed.Cell
    spec: RunSpec
    resources: Resources


def cells_of(command: Command, cluster: ClusterSpec) -> list[ClusterCell]:
    """Return the cells of a command, each with the device of its job's machine.

    Raises:
        UserError: a value of a cell is wrong.
    """
    # Without GPUs a worker of this machine computes on its CPU, whatever the model requests.
    has_gpus = bool(devices()) if cluster.name == "joblib" else True
    cells = []
    for config in command.cells:
        spec = build_spec(config, folders=command.folders)
        resources = resources_of(config, spec, cluster)
        gpus = resources.gpus if has_gpus else 0
        cells.append(ClusterCell(config, on_its_machine(config, spec, gpus), resources))
    return cells


def grouped(
    cells: Sequence[tuple[ClusterCell, Job]], limit: int
) -> list[JobGroup[tuple[ClusterCell, Job]]]:
    """Return the jobs of cells to run; cells of one run count once."""
    first = {job.key: (cell, job) for cell, job in reversed(cells)}
    ordered = [pair for pair in cells if pair[1] is first[pair[1].key][1]]
    return group_cells(
        [
            (cell.spec.model.name, repr(cell.spec.model), cell.resources, (cell, job))
            for cell, job in ordered
        ],
        limit,
    )


def run_as_jobs(command: Command, cluster: ClusterSpec, waiting: StatusLine) -> int:
    """Run the cells of a command as jobs, wait for them, and print the output of a local sweep; return the exit code.

    Raises:
        UserError: a cell or a setting is wrong, or no machine can take a job.
        StoreLost: the store cannot be written.
    """
    waiting.say("checking the cells")
    cells = cells_of(command, cluster)
    specs = [cell.spec for cell in cells]
    runner = Runner(command.sweep, argv=command.argv, waiting=waiting, lines=command.lines)
    runner.admit(specs)
    runner.announce(specs)
    jobs_by_spec = {id(spec): job for spec, job in runner.jobs}
    admitted = [
        (cell, jobs_by_spec[id(cell.spec)]) for cell in cells if id(cell.spec) in jobs_by_spec
    ]
    store = cells[0].spec.store
    launcher: Launcher = (
        Slurm(cluster, store) if cluster.name == "slurm" else LocalWorkers(cluster, devices())
    )
    # LocalWorkers end with their command; a queue continues without it.
    unfinished = Jobs.unfinished(store, launcher) if isinstance(launcher, Slurm) else Jobs()
    to_do = [
        (cell, job)
        for cell, job in admitted
        if runner.stored(job) is None and job.key not in unfinished.keys
    ]
    packs = grouped(to_do, cluster.cells_per_job)
    jobs = unfinished.of({job.key for _, job in admitted})
    if packs:
        launcher.check(packs)
        jobs = jobs.merged(_start(command, launcher, packs, store))
    waiting.clear()
    if jobs and not cluster.wait:
        streams.tell(f"submitted {jobs}; the same command with cluster.wait=true waits for them")
        return 0
    if jobs:
        watch(jobs, launcher, cluster.poll, waiting, streams.tell)
    return _collect(runner, cells, jobs)


def _start(
    command: Command,
    launcher: Launcher,
    packs: Sequence[JobGroup[tuple[ClusterCell, Job]]],
    store: Path,
) -> Jobs:
    """Write the files of jobs and start the jobs."""
    folder = below(store, "cluster") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    _make(folder)
    if isinstance(launcher, Slurm):
        launcher.folder = folder / "slurm"
    files = [JobFile(folder / f"job-{number:03}.json") for number in range(len(packs))]
    for group, file in zip(packs, files, strict=True):
        file.write([_entry(cell, job, command) for cell, job in group.cells])
    try:
        launcher.start(packs, files)
    finally:
        # The first of several arrays may be queued when the second is refused.
        jobs = Jobs(dict(zip(launcher.names, files, strict=False)))
        _note(command, folder, jobs)
    cells = sum(len(group.cells) for group in packs)
    streams.tell(f"{cells} cells in {jobs}; their output: {short_path(folder)}/job-*.log")
    return jobs


def _note(command: Command, folder: Path, jobs: Jobs) -> None:
    """Store which job has which file, so that the same command finds them again; without jobs, remove the folder."""
    if not jobs:
        shutil.rmtree(folder)
        return
    files = {name: file.path.name for name, file in jobs.files.items()}
    about = {"command": list(command.argv), "jobs": files}
    durable.replace(folder / "sweep.json", f"{json.dumps(about, indent=1)}\n".encode())


def _entry(cell: ClusterCell, job: Job, command: Command) -> JobCell:
    config = {key: value for key, value in cell.config.items() if key not in NOT_OF_A_RUN}
    device = cell.spec.model.device
    model = config["model"] | ({"device": device} if config["model"]["device"] == "auto" else {})
    row = Store(job.spec.store).run(job.key).path / "row.json"
    return JobCell(
        key=job.key,
        row=str(row),
        before=row_time(row),
        config={**config, **OF_A_JOB, "store": str(job.spec.store), "model": model},
        conf=tuple(map(str, command.folders)),
    )


def _collect(runner: Runner, cells: Sequence[ClusterCell], jobs: Jobs) -> int:
    """Collect all rows, report the reason for each cell without one, and return the exit code."""
    admitted = {id(spec): job for spec, job in runner.jobs}
    for cell in cells:
        runner.board.forecast.cell += 1
        job = admitted.get(id(cell.spec))
        if job is None:
            continue
        lost = jobs.missing(job.key)
        if lost is None and runner.collect(job, fresh=job.key in jobs.keys):
            continue
        lost = lost or LeftOut(job.key, "its job ended and left no row of this key", 1)
        runner.failed(cell.spec, lost.reason, lost.code)
    runner.finish(cells[-1].spec)
    outcome = runner.outcome
    if outcome.codes:
        # For a sweep `finish` has listed the causes.
        _, cause = outcome.left_out[-1]
        count = f"{len(outcome.codes)} of {len(cells)} cells have no row"
        streams.print_error(count if runner.sweep else cause)
    return outcome.code


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise StoreLost(f"store: {folder} cannot be made: {error.strerror or error}") from error
