"""A command with cells that run as jobs: group, start and watch the jobs, then report from the store.

Each command has its own folder, `<store>/cluster/<sweep>`, with a file for each job. Only the row of a cell shows that
it is finished: a job may be COMPLETED and have failed, or be killed after its last row.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from espalier.harness.config import composer as composed
from espalier.harness.config.build_spec import build_specs
from espalier.harness.config.cell_settings import NOT_OF_A_RUN, CellSettings
from espalier.harness.config.compose import Command
from espalier.harness.errors import FOREIGN, StoreLost, first_words, tell_once
from espalier.harness.paths import short_path
from espalier.harness.runs import streams
from espalier.harness.runs.admission import Job
from espalier.harness.runs.cluster.job_file import (
    JobCell,
    JobFile,
    JobGroup,
    JobState,
    Launcher,
    LeftOut,
    group_cells,
    row_time,
)
from espalier.harness.runs.cluster.launchers import LocalWorkers, Slurm, devices
from espalier.harness.runs.cluster.remote_workers import RemoteWorkers
from espalier.harness.runs.cluster.resources import (
    ClusterSpec,
    Resources,
    on_its_machine,
    resources_of,
)
from espalier.harness.runs.progress_bar import clock
from espalier.harness.runs.runner import Runner
from espalier.harness.runs.streams import StatusLine
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import read_json
from espalier.harness.store.files.folder_checks import below

D = TypeVar("D")

#: Settings of a job: it draws nothing, and skips cells that cannot run on its machine.
OF_A_JOB = {"curves": None, "report": None, "refused": "skip", "json": True}


@dataclass(frozen=True)
class ClusterCell:
    """A cell of a command: its composed config, its run, and the resources of its job."""

    config: composed.Cell
    spec: RunSpec
    resources: Resources


def cells_of(
    command: Command, settings: Sequence[CellSettings], cluster: ClusterSpec
) -> list[ClusterCell]:
    """Return the cells of a command, with their settings, each with the device of its job's machine.

    Raises:
        UserError: a value of a cell is wrong.
    """
    # Without GPUs a worker of this machine computes on its CPU, whatever the model requests.
    has_gpus, cells = not cluster.on_this_machine or bool(devices()), []
    for config, spec in zip(command.cells, build_specs(settings, command.folders), strict=True):
        resources = resources_of(config, spec, cluster)
        gpus = resources.gpus if has_gpus else 0
        cells.append(ClusterCell(config, on_its_machine(config, spec, gpus), resources))
    return cells


def job_groups(cells: Iterable[tuple[str, ClusterCell, D]], limit: int) -> list[JobGroup[D]]:
    """Return the jobs of cells, each with its run key and what the job holds of it; cells of one run count once."""
    first: dict[str, tuple[str, str, Resources, D]] = {}
    for run, cell, entry in cells:
        model = cell.spec.model
        first.setdefault(run, (model.name, repr(model), cell.resources, entry))
    return group_cells(list(first.values()), limit)


def run_as_jobs(
    command: Command, settings: Sequence[CellSettings], cluster: ClusterSpec, waiting: StatusLine
) -> int:
    """Run the cells of a command as jobs, wait for them, and print the output of a local sweep; return the exit code.

    Raises:
        UserError: a cell or a setting is wrong, or no machine can take a job.
        StoreLost: the store cannot be written.
    """
    waiting.say("checking the cells")
    cells = cells_of(command, settings, cluster)
    runner = Runner(command.sweep, argv=command.argv, waiting=waiting, lines=command.lines)
    runner.admit([cell.spec for cell in cells])
    runner.announce()
    by_spec = {id(cell.spec): cell for cell in cells}
    admitted = [(by_spec[id(spec)], job) for spec, job, _ in runner.admitted]
    store = cells[0].spec.store
    launcher: Launcher
    if cluster.name == "slurm":
        launcher = Slurm(cluster, store)
    else:
        launcher = (
            LocalWorkers(cluster, devices()) if cluster.on_this_machine else RemoteWorkers(cluster)
        )
    # Other jobs end with their command; a queue continues without it.
    unfinished = Jobs.unfinished(store, launcher) if isinstance(launcher, Slurm) else Jobs()
    to_do = (
        (job.key, cell, (cell, job))
        for cell, job in admitted
        if runner.cells.stored(job) is None and job.key not in unfinished.keys
    )
    packs = job_groups(to_do, cluster.cells_per_job)
    jobs = unfinished.of({job.key for _, job in admitted})
    if packs:
        launcher.check(packs)
        started = _start(command, launcher, packs, store)
        jobs = Jobs({**jobs.files, **started.files})
    waiting.clear()
    if jobs and not cluster.wait:
        streams.tell(f"submitted {jobs}; the same command with cluster.wait=true waits for them")
        return 0
    if jobs:
        watch(jobs, launcher, cluster.poll, waiting, streams.tell)
    return _collect(runner, len(cells), jobs)


def _start(
    command: Command,
    launcher: Launcher,
    packs: Sequence[JobGroup[tuple[ClusterCell, Job]]],
    store: Path,
) -> Jobs:
    """Write the files of jobs and start the jobs."""
    folder = below(store, "cluster") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise StoreLost(f"store: {folder} cannot be made: {error.strerror or error}") from error
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
        if jobs:
            # By its job names the same command finds them again.
            names = {name: file.path.name for name, file in jobs.files.items()}
            about = {"command": list(command.argv), "jobs": names}
            durable.replace(folder / "sweep.json", f"{json.dumps(about, indent=1)}\n".encode())
        else:
            shutil.rmtree(folder)
    cells = sum(len(group.cells) for group in packs)
    streams.tell(f"{cells} cells in {jobs}; their output: {short_path(folder)}/job-*.log")
    return jobs


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


def _collect(runner: Runner, cells: int, jobs: Jobs) -> int:
    """Collect all rows, report the reason for each cell without one, and return the exit code."""
    for cell in runner.admitted:
        key = cell.job.key
        lost = jobs.missing(key)
        if lost is None and not runner.collect(cell.job, fresh=key in jobs.keys):
            lost = LeftOut(key, "its job ended and left no row of this key", 1)
        if lost is not None:
            runner.failed(cell, lost.reason, lost.code)
    runner.finish()
    if runner.failures:
        # For a sweep `finish` has listed the causes.
        count = f"{len(runner.failures)} of {cells} cells have no row"
        streams.print_error(count if runner.sweep else runner.failures[-1][1])
    return runner.code


#: Seconds to wait for a job after all its cells are done: a queue may list a dead job as running.
LINGERING = 30.0

#: Seconds between two lines without a terminal.
QUIET = 30.0


@dataclass(frozen=True)
class Jobs:
    """Jobs by name, each with its file, and their last known states."""

    files: Mapping[str, JobFile] = field(default_factory=dict)
    states: dict[str, JobState] = field(default_factory=dict)

    @classmethod
    def unfinished(cls, store: Path, launcher: Launcher) -> Jobs:
        """Return the jobs of earlier commands on this store that have not ended, as far as the launcher knows them."""
        files: dict[str, JobFile] = {}
        for about in sorted(store.glob("cluster/*/sweep.json")):
            try:
                jobs = {str(name): file for name, file in read_json(about)["jobs"].items()}
                files |= {name: JobFile(about.with_name(file)) for name, file in jobs.items()}
            except FOREIGN as error:
                tell_once(f"passed over: {about}: {first_words(error)}")
        states = launcher.states(list(files)) if files else {}
        live = {name for name, state in (states or {}).items() if not state.over}
        return cls({name: file for name, file in files.items() if name in live})

    @cached_property
    def entries(self) -> dict[str, list[JobCell]]:
        """The cells of each job."""
        return {name: file.entries() for name, file in self.files.items()}

    @cached_property
    def keys(self) -> frozenset[str]:
        """Run keys of all cells."""
        return frozenset(entry.key for cells in self.entries.values() for entry in cells)

    def of(self, keys: Collection[str]) -> Jobs:
        """Return the jobs that have a cell of these runs."""
        return Jobs(
            {
                name: file
                for name, file in self.files.items()
                if any(cell.key in keys for cell in self.entries[name])
            }
        )

    def missing(self, key: str) -> LeftOut | None:
        """Return why a run has no new row; None if it has one, or if no job has its cell."""
        for name, cells in self.entries.items():
            if any(cell.key == key and not cell.done for cell in cells):
                return self._reason(name, key)
        return None

    def __bool__(self) -> bool:
        """Return whether there is any job."""
        return bool(self.files)

    def __str__(self) -> str:
        """Return their number and names."""
        names = list(self.files)
        names_text = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"{len(names)} job{'s' if len(names) > 1 else ''} ({names_text})"

    def _reason(self, name: str, key: str) -> LeftOut:
        file, state = self.files[name], self.states.get(name, JobState("ENDED"))
        noted, code, job = file.left_out().get(key), file.ended(), f"job {name}"
        if noted is not None:
            return noted
        reason = f"{job} made a row of another key: code, packages or weights changed since the submission"
        if code is None:
            reason = f"{job} ended before this cell was done: {state}; {file.log}"
        elif code < 0:
            named = -code in set(signal.Signals)
            killer = signal.Signals(-code).name if named else f"signal {-code}"
            reason = f"the process of {job} was killed by {killer}; {file.log}"
        elif code:
            reason = f"{job}: {_last_error(file.log) or f'exit code {code}'}"
        return LeftOut(key, reason, max(code or 0, 1))


def watch(
    jobs: Jobs,
    launcher: Launcher,
    poll: float,
    waiting: StatusLine,
    tell: Callable[[str], None],
) -> None:
    """Return when all jobs have ended, and report their progress meanwhile.

    Args:
        jobs: their states are updated.
        launcher: runs the jobs.
        poll: seconds between two queries.
        waiting: the line of a terminal.
        tell: prints a line without a terminal.
    """
    start, last, spoken = time.monotonic(), "", -QUIET

    def say(text: str) -> None:
        """Change the line of a terminal; elsewhere print another line from time to time, if it changed."""
        nonlocal last, spoken
        elapsed = time.monotonic() - start
        if sys.stderr is not None and sys.stderr.isatty():
            waiting.say(f"{clock(elapsed)}  {text}")
        elif text != last and elapsed - spoken >= QUIET:
            tell(text)
            last, spoken = text, elapsed

    ends: Counter[str] = Counter()
    complete_since: dict[str, float] = {}
    try:
        while True:
            states = launcher.states(list(jobs.files))
            if states is None:
                say("the queue does not answer; running jobs continue")
            else:
                jobs.states.update(states)
                for name, state in states.items():
                    # A job that is being queued again may look ended for a moment.
                    ends[name] = ends[name] + 1 if state.over else 0
                    if all(entry.done for entry in jobs.entries[name]):
                        complete_since.setdefault(name, time.monotonic())
                say(_summary(jobs, states))
                if all(_ended(name, ends, complete_since) for name in jobs.files):
                    return
            time.sleep(poll)
    except BaseException:
        waiting.clear()
        if message := launcher.stop():
            tell(message)
        raise
    finally:
        waiting.clear()


def _ended(name: str, ends: Mapping[str, int], complete_since: Mapping[str, float]) -> bool:
    if name not in complete_since:
        return ends[name] >= 2
    return ends[name] >= 1 or time.monotonic() - complete_since[name] > LINGERING


def _summary(jobs: Jobs, states: Mapping[str, JobState]) -> str:
    """Return the number of finished cells, and the states of the jobs."""
    cells = [entry for job_cells in jobs.entries.values() for entry in job_cells]
    done = sum(entry.done for entry in cells)
    counts = Counter("ended" if state.over else str(state) for state in states.values())
    states_text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return f"{done} of {len(cells)} cells done; jobs: {states_text}"


def _last_error(log: Path) -> str | None:
    """Return the last error line of a log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else None
