"""A command line whose cells run as jobs: what is to be run is packed, started, watched, and told from the store.

Each command has a folder of its own, `<store>/cluster/<sweep>`, with a file for each job. Whether a cell is finished is
said by its row: a job may be COMPLETED and have failed, or be killed behind its last row.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.config import cell_config as composed
from espalier.harness.config.build_spec import NOT_OF_A_RUN, build_spec
from espalier.harness.config.compose import Command
from espalier.harness.errors import StoreLost
from espalier.harness.runs import hints, streams
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.job_file import Entry, JobFile, LeftOut, written
from espalier.harness.runs.cluster.job_groups import Pack, pack
from espalier.harness.runs.cluster.job_monitor import Jobs, watch
from espalier.harness.runs.cluster.job_state import Launcher
from espalier.harness.runs.cluster.local_workers import Workers, devices
from espalier.harness.runs.cluster.resources import Resources, on_its_machine, resources_of
from espalier.harness.runs.cluster.slurm import Slurm
from espalier.harness.runs.preflight import Job
from espalier.harness.runs.runner import Runner
from espalier.harness.runs.status_line import Waiting
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from espalier.harness.store.files import durable

#: What a job does not do: it draws nothing, and a cell that cannot run on its machine keeps no other from running.
OF_A_JOB = {"curves": None, "report": None, "refused": "skip", "json": True}


@dataclass(frozen=True)
class Cell:
    """A cell of a command: what was composed, the run that it is, and what its job takes."""

    config: composed.Cell
    spec: RunSpec
    resources: Resources


def cells_of(command: Command, cluster: ClusterSpec) -> list[Cell]:
    """Return the cells of a command, each as the machine of its job will have it.

    Raises:
        UserError: a value of a cell is wrong.
    """
    # Without GPUs a worker of this machine computes on its CPU, whatever the model asks for.
    own = bool(devices()) if cluster.name == "joblib" else True
    found = []
    for config in command.cells:
        spec = build_spec(config)
        resources = resources_of(config, spec, cluster)
        gpus = resources.gpus if own else 0
        found.append(Cell(config, on_its_machine(config, spec, gpus), resources))
    return found


def packed(cells: Sequence[tuple[Cell, Job]], at_most: int) -> list[Pack[tuple[Cell, Job]]]:
    """Return the jobs of cells that are to be run; cells of one run are one."""
    first = {job.key: (cell, job) for cell, job in reversed(cells)}
    ordered = [one for one in cells if one[1] is first[one[1].key][1]]
    return pack(
        [
            (cell.spec.model.name, repr(cell.spec.model), cell.resources, (cell, job))
            for cell, job in ordered
        ],
        at_most,
    )


def spread(command: Command, cluster: ClusterSpec, waiting: Waiting) -> int:
    """Run the cells of a command as jobs, wait for them, and print what a local sweep prints; return the exit code.

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
    found = {id(spec): job for spec, job in runner.jobs}
    admitted = [(cell, found[id(cell.spec)]) for cell in cells if id(cell.spec) in found]
    store = cells[0].spec.store
    launcher: Launcher = (
        Slurm(cluster, store) if cluster.name == "slurm" else Workers(cluster, devices())
    )
    # Workers end with their command; a queue goes on without it.
    standing = Jobs.standing(store, launcher) if isinstance(launcher, Slurm) else Jobs()
    to_do = [
        (cell, job)
        for cell, job in admitted
        if runner.stored(job) is None and job.key not in standing.keys
    ]
    packs = packed(to_do, cluster.cells_per_job)
    jobs = standing.of({job.key for _, job in admitted})
    if packs:
        launcher.check(packs)
        jobs = jobs.plus(_start(command, launcher, packs, store))
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
    packs: Sequence[Pack[tuple[Cell, Job]]],
    store: Path,
) -> Jobs:
    """Write the files of jobs and start these."""
    folder = store / "cluster" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    _make(folder)
    if isinstance(launcher, Slurm):
        launcher.folder = folder / "slurm"
    files = [JobFile(folder / f"job-{number:03}.json") for number in range(len(packs))]
    for one, file in zip(packs, files, strict=True):
        file.write([_entry(cell, job) for cell, job in one.cells])
    try:
        launcher.start(packs, files)
    finally:
        # Of several arrays the first may be in the queue when the second is refused.
        jobs = Jobs(dict(zip(launcher.names, files, strict=False)))
        _note(command, folder, jobs)
    cells = sum(len(one.cells) for one in packs)
    streams.tell(f"{cells} cells in {jobs}; what they print: {hints.shorter(folder)}/job-*.log")
    return jobs


def _note(command: Command, folder: Path, jobs: Jobs) -> None:
    """Note which job has which file, so that the same command finds them again; of no job nothing is left."""
    if not jobs:
        shutil.rmtree(folder)
        return
    files = {name: file.path.name for name, file in jobs.files.items()}
    about = {"command": list(command.argv), "jobs": files}
    durable.replace(folder / "sweep.json", f"{json.dumps(about, indent=1)}\n".encode())


def _entry(cell: Cell, job: Job) -> Entry:
    config = {key: value for key, value in cell.config.items() if key not in NOT_OF_A_RUN}
    device = cell.spec.model.device
    model = config["model"] | ({"device": device} if config["model"]["device"] == "auto" else {})
    row = Store(job.spec.store).run(job.key).path / "row.json"
    return Entry(
        key=job.key,
        row=str(row),
        before=written(row),
        config={**config, **OF_A_JOB, "store": str(job.spec.store), "model": model},
    )


def _collect(runner: Runner, cells: Sequence[Cell], jobs: Jobs) -> int:
    """Take every row that is there, tell of each other cell why it has none, and return the exit code."""
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
        # Of a sweep `finish` has listed the causes.
        _, cause = outcome.left_out[-1]
        count = f"{len(outcome.codes)} of {len(cells)} cells have no row"
        streams.complain(count if runner.sweep else cause)
    return outcome.code


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise StoreLost(f"store: {folder} cannot be made: {error.strerror or error}") from error
