"""`cluster=slurm`: jobs as arrays, submitted by submitit, watched by squeue.

submitit writes the batch script, pickles the call, and queues the job again on the signal before a time limit or a
preemption. It would query job states from sacct, which not every cluster answers; this module uses squeue, and only the
row of a cell shows that it is finished.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.paths import IMPORTED_FROM, child_path
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.job_file import JobFile, JobGroup, JobState, SlurmJob
from espalier.harness.runs.cluster.resources import Resources

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
    groups = []
    for line in text.splitlines():
        partition, gres, cpus, memory, limit = line.split("|")
        groups.append(
            NodeGroup(
                partition.rstrip("*"),
                partition.endswith("*"),
                sum(map(int, _GPUS.findall(gres))),
                int(cpus.rstrip("+")),
                int(memory.rstrip("+")),
                _minutes(limit),
            )
        )
    return groups


def check_request(resources: Resources, model: str, nodes: Sequence[NodeGroup]) -> None:
    """Raise UserError if no node has a job's resources: it would be refused, or wait for ever."""
    names = sorted({group.partition for group in nodes})
    if resources.partition is not None and resources.partition not in names:
        raise UserError(
            f"cluster.partition={resources.partition!r} (model={model}): SLURM has no such partition; valid: "
            f"{', '.join(names) or 'none, it lists no node'}"
        )
    matching = [
        group
        for group in nodes
        if (
            group.default if resources.partition is None else group.partition == resources.partition
        )
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
                calls = [SlurmJob(str(file.path)) for _, file in array]
                try:
                    jobs = _submit(executor, calls)
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
        command = (
            "squeue",
            "-h",
            "-a",
            "-r",
            "-t",
            "all",
            "-j",
            ",".join(arrays),
            "-o",
            "%i|%T|%r",
        )
        try:
            lines = _query(*command).splitlines()
        except SlurmSilent as error:
            # Error for a single job that SLURM has forgotten; for several it lists the known ones.
            if "Invalid job id" not in str(error):
                return None
            lines = []
        states = {}
        for line in lines:
            name, state, reason = line.split("|", 2)
            states[name] = JobState(state, reason)
        return {name: states.get(name, JobState("ENDED")) for name in names}

    def stop(self) -> str:
        """Keep the jobs running; return a line on how to wait for them or end them."""
        arrays = " ".join(sorted({name.partition("_")[0] for name in self.names}))
        return (
            f"jobs {arrays} go on; the same command waits for them again, `scancel {arrays}` ends them"
            if arrays
            else ""
        )


class SlurmSilent(UserError):
    """A command of SLURM failed or did not answer."""


def _submit(executor: Any, calls: Sequence[SlurmJob]) -> list[Any]:
    """Submit calls as one array."""
    # The output of sbatch is also in the error, and would appear twice.
    with contextlib.redirect_stderr(io.StringIO()), executor.batch():
        jobs = [executor.submit(call) for call in calls]
    return jobs


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
