"""What runs jobs: `cluster=slurm` as arrays of a queue, `cluster=joblib` in parallel on this machine.

submitit writes the batch script, pickles the call, and queues the job again on the signal before a time limit or a
preemption. It would query job states from sacct, which not every cluster answers; this module uses squeue, and only the
row of a cell shows that it is finished.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.paths import IMPORTED_FROM, child_path
from espalier.harness.runs.cluster.job_file import JobFile, JobGroup, JobState, SlurmJob, run_job
from espalier.harness.runs.cluster.resources import ClusterSpec, Resources

_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


@dataclass(frozen=True)
class NodeGroup:
    """Identical nodes of one partition.

    Attributes:
        partition: its name.
        default: whether it is the default partition.
        gpus: of a node, of all types.
        cpus: of a node.
        memory: MiB of a node.
        minutes: time limit of the partition.
    """

    partition: str
    default: bool
    gpus: int
    cpus: int
    memory: int
    minutes: float


def nodes_of(text: str) -> list[NodeGroup]:
    """Return the nodes in the output of `sinfo -h -e -o "%P|%G|%c|%m|%l"`."""
    return [
        NodeGroup(
            partition.rstrip("*"),
            partition.endswith("*"),
            sum(map(int, _GPUS.findall(gres))),
            int(cpus.rstrip("+")),
            int(memory.rstrip("+")),
            _minutes(limit),
        )
        for partition, gres, cpus, memory, limit in (line.split("|") for line in text.splitlines())
    ]


def check_request(resources: Resources, model: str, nodes: Sequence[NodeGroup]) -> None:
    """Raise UserError if no node has a job's resources: it would be refused, or wait for ever."""
    names = sorted({group.partition for group in nodes})
    if resources.partition is not None and resources.partition not in names:
        raise UserError(
            f"cluster.partition={resources.partition!r} (model={model}): SLURM has no such partition; valid: "
            f"{', '.join(names) or 'none, it lists no node'}"
        )
    chosen = resources.partition
    matching = [
        group for group in nodes if (group.default if chosen is None else group.partition == chosen)
    ]
    if not matching:
        raise UserError(
            f"cluster.partition=None: SLURM has no default partition; valid: {', '.join(names)}"
        )
    place = f"partition {matching[0].partition}"
    wanted = {
        "gpus": (resources.gpus, max(group.gpus for group in matching), ""),
        "cpus": (resources.cpus, max(group.cpus for group in matching), ""),
        "memory": (
            math.ceil(resources.memory / 2**20),
            max(group.memory for group in matching),
            "MiB",
        ),
        "minutes": (resources.minutes, max(group.minutes for group in matching), ""),
    }
    for name, (value, limit, unit) in wanted.items():
        if value > limit:
            raise UserError(
                f"cluster.{name}={value}{unit} (model={model}): no node of {place} gives as much; valid: at most "
                f"{limit:g}{unit}"
            )


def _minutes(limit: str) -> float:
    """Return the minutes of a time limit: `infinite`, `30:00`, `12:00:00` or `7-00:00:00`."""
    if limit in ("infinite", "UNLIMITED", "n/a"):
        return math.inf
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


#: Maximum jobs of one array; clusters allow 1001 by default (MaxArraySize).
LARGEST_ARRAY = 1000

#: Prints a line for each job of an array: its id, state and the reason for it.
QUEUE = ("squeue", "-h", "-a", "-r", "-t", "all", "-o", "%i|%T|%r")

#: Time limit of a SLURM command in seconds.
PATIENCE = 60


@dataclass
class Slurm:
    """Submits jobs and queries their states.

    Args:
        cluster: the user's settings.
        folder: for scripts and their output.
    """

    cluster: ClusterSpec
    folder: Path
    names: list[str] = field(default_factory=list)

    def check(self, packs: Sequence[JobGroup[object]]) -> None:
        """Raise UserError if SLURM is not installed here or has no node that fits a job."""
        for name in ("sbatch", "srun", "squeue", "sinfo"):
            if shutil.which(name) is None:
                raise UserError(
                    f"cluster=slurm: there is no {name} here; valid: cluster=local, cluster=joblib, or a machine from "
                    "which jobs are submitted"
                )
        nodes = nodes_of(_query("sinfo", "-h", "-e", "-o", "%P|%G|%c|%m|%l"))
        for resources, model in {group.resources: group.model for group in packs}.items():
            check_request(resources, model, nodes)

    def start(self, packs: Sequence[JobGroup[object]], files: Sequence[JobFile]) -> None:
        """Submit the jobs, an array per sequence of jobs with the same resources; `names` are their ids, as `12_3`.

        Raises:
            UserError: SLURM refuses.
        """
        # Imported here: only submitting needs it.
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        work = zip(packs, files, strict=True)
        for _, same_resources in groupby(work, key=lambda pair: (pair[0].resources, pair[0].model)):
            pairs = list(same_resources)
            for first in range(0, len(pairs), LARGEST_ARRAY):
                array = pairs[first : first + LARGEST_ARRAY]
                executor = SlurmExecutor(self.folder, max_num_timeout=self.cluster.timeouts)
                executor.update_parameters(**self.parameters(array[0][0]))
                try:
                    # The output of sbatch is also in the error, and would appear twice.
                    with contextlib.redirect_stderr(io.StringIO()), executor.batch():
                        jobs = [executor.submit(SlurmJob(str(file.path))) for _, file in array]
                except FailedJobError as error:
                    reason = " ".join(str(error).replace("sbatch: error: ", "").split())
                    raise UserError(f"cluster=slurm: sbatch refuses the job: {reason}") from error
                self.names += [str(job.job_id) for job in jobs]

    def parameters(self, group: JobGroup[object]) -> dict[str, Any]:
        """Return submitit's parameters of sbatch for a job."""
        resources = group.resources
        settings = {
            "job_name": f"espalier-{group.model}",
            "time": resources.minutes,
            "mem": f"{math.ceil(resources.memory / 2**20)}M",
            "cpus_per_task": resources.cpus,
            "gpus_per_node": resources.gpus or None,
            "partition": resources.partition,
            # SLURM signals up to a minute early; a short job is signalled after half of its time at the earliest.
            "signal_delay_s": min(self.cluster.grace, 30 * resources.minutes),
            "array_parallelism": self.cluster.array_parallelism,
            "setup": [f'export PYTHONPATH={shlex.quote(str(IMPORTED_FROM))}:"$PYTHONPATH"']
            if child_path()
            else None,
            "additional_parameters": {"requeue": True, **self.cluster.options},
        }
        return {name: value for name, value in settings.items() if value is not None}

    def states(self, names: Sequence[str]) -> Mapping[str, JobState] | None:
        """Return the state of each job; None if SLURM does not answer."""
        arrays = sorted({name.partition("_")[0] for name in names})
        try:
            text = _query(*QUEUE, "-j", ",".join(arrays))
        except SlurmSilent as error:
            # Error for a single job that SLURM has forgotten; for several it lists the known ones.
            if "Invalid job id" not in str(error):
                return None
            text = ""
        lines = (line.split("|", 2) for line in text.splitlines())
        states = {name: JobState(state, reason) for name, state, reason in lines}
        return {name: states.get(name, JobState("ENDED")) for name in names}

    def stop(self) -> str:
        """Keep the jobs running; return a line on how to wait for them or end them."""
        arrays = " ".join(sorted({name.partition("_")[0] for name in self.names}))
        advice = f"the same command waits for them again, `scancel {arrays}` ends them"
        return f"jobs {arrays} go on; {advice}" if arrays else ""


class SlurmSilent(UserError):
    """A command of SLURM failed or did not answer."""


def _query(*command: str) -> str:
    """Return the output of a SLURM command; raises SlurmSilent."""
    try:
        result = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"cluster=slurm: {command[0]} does not answer") from error
    if result.returncode:
        reason = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise SlurmSilent(f"cluster=slurm: {command[0]} fails: {reason}")
    return result.stdout


VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as named in CUDA_VISIBLE_DEVICES."""
    import torch  # takes seconds, and a queue needs no GPU here

    count = torch.cuda.device_count()
    visible = os.environ.get(VISIBLE)
    names = [str(number) for number in range(count)] if visible is None else visible.split(",")
    return tuple(name.strip() for name in names[:count])


class GpuPool:
    """A pool of GPUs for jobs."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start with all GPUs free."""
        self._free = list(names)
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[tuple[str, ...]]:
        """Hold `count` GPUs, as soon as that many are free; `count` must not exceed the pool."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = tuple(self._free[:count]), self._free[count:]
        try:
            yield taken
        finally:
            with self._changed:
                self._free = sorted((*self._free, *taken))
                self._changed.notify_all()


@dataclass
class LocalWorkers:
    """Runs jobs in threads; each thread waits for the process of its job.

    Args:
        cluster: the user's settings.
        gpus: for the jobs; empty: all jobs run on the CPU, also those that request GPUs.
    """

    cluster: ClusterSpec
    gpus: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _states: dict[str, JobState] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def check(self, packs: Sequence[JobGroup[object]]) -> None:
        """Raise UserError if a job requests more GPUs than exist."""
        for job in packs:
            if self.gpus and job.resources.gpus > len(self.gpus):
                raise UserError(
                    f"cluster.gpus={job.resources.gpus} (model={job.model}): this machine has {len(self.gpus)} GPUs; "
                    f"valid: at most {len(self.gpus)}"
                )

    def start(self, packs: Sequence[JobGroup[object]], files: Sequence[JobFile]) -> None:
        """Start the jobs in their order."""
        self.names += [file.path.stem for file in files]
        self._states = dict.fromkeys(self.names, JobState("PENDING"))
        work = list(zip(self.names, packs, files, strict=True))
        at_once = self.at_once(packs)
        pool = GpuPool(self.gpus)

        def run(name: str, job: JobGroup[object], file: JobFile) -> None:
            if self._stopped.is_set():
                return
            with pool.take(job.resources.gpus if self.gpus else 0) as taken:
                self._states[name] = JobState("RUNNING")
                threads = str(max(1, (os.cpu_count() or 1) // at_once))
                variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
                run_job(
                    file,
                    {**variables, VISIBLE: ",".join(taken)} if self.gpus else variables,
                    self._stopped.is_set,
                )
            self._states[name] = JobState("ENDED")

        def run_all() -> None:
            # Imported here: only starting workers needs it.
            from joblib import Parallel, delayed

            Parallel(n_jobs=at_once, backend="threading")(delayed(run)(*job) for job in work)

        self._thread = threading.Thread(target=run_all, name="jobs")
        self._thread.start()

    def states(self, names: Sequence[str]) -> Mapping[str, JobState]:
        """Return the state of each job; ended if its worker is gone."""
        alive = self._thread is not None and self._thread.is_alive()
        return {name: self._states[name] if alive else JobState("ENDED") for name in names}

    def stop(self) -> str:
        """End all jobs and wait for them; return an empty message."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        return ""

    def at_once(self, packs: Sequence[JobGroup[object]]) -> int:
        """Return the number of parallel jobs."""
        gpus = max(job.resources.gpus for job in packs)
        if self.cluster.workers is not None:
            room = self.cluster.workers
        elif self.gpus and gpus:
            room = len(self.gpus) // gpus
        else:
            room = (os.cpu_count() or 1) // max(job.resources.cpus for job in packs)
        return max(1, min(room, len(packs)))
