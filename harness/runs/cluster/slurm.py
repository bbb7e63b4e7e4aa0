"""`cluster=slurm`: jobs as arrays, submitted by submitit, watched by squeue.

submitit writes the batch script, carries the call over, and on the signal before a time limit or a preemption queues
the job again. It would ask sacct how jobs are, which not every cluster answers; squeue does, and whether a cell is
finished is said by its row alone.
"""

from __future__ import annotations

import contextlib
import io
import math
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.job_file import JobFile
from espalier.harness.runs.cluster.job_groups import Pack
from espalier.harness.runs.cluster.job_state import State
from espalier.harness.runs.cluster.nodes import check_request, nodes_of
from espalier.harness.runs.cluster.slurm_job import SlurmJob

#: Jobs of one array; clusters allow 1001 unless they say otherwise (MaxArraySize).
LARGEST_ARRAY = 1000

#: Seconds that a command of SLURM may take.
PATIENCE = 60


@dataclass
class Slurm:
    """Submits jobs and asks how they are.

    Args:
        cluster: what the user sets.
        folder: where scripts and what they print go.
    """

    cluster: ClusterSpec
    folder: Path
    names: list[str] = field(default_factory=list)

    def check(self, packs: Sequence[Pack[object]]) -> None:
        """Raise UserError where SLURM is not here or has no node that a job fits on."""
        for name in ("sbatch", "srun", "squeue", "sinfo"):
            if shutil.which(name) is None:
                raise UserError(
                    f"cluster=slurm: there is no {name} here; valid: cluster=local, cluster=joblib, or a machine from "
                    "which jobs are submitted"
                )
        nodes = nodes_of(_ask("sinfo", "-h", "-e", "-o", "%P|%G|%c|%m|%l"))
        for resources, model in {one.resources: one.model for one in packs}.items():
            check_request(resources, model, nodes)

    def start(self, packs: Sequence[Pack[object]], files: Sequence[JobFile]) -> None:
        """Submit the jobs, an array for each run of them that takes the same; `names` are their ids, as `12_3`.

        Raises:
            UserError: SLURM refuses.
        """
        # Only who submits pays for it.
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        work = zip(packs, files, strict=True)
        for _, same in groupby(work, key=lambda one: (one[0].resources, one[0].model)):
            part = list(same)
            for first in range(0, len(part), LARGEST_ARRAY):
                array = part[first : first + LARGEST_ARRAY]
                executor = SlurmExecutor(self.folder, max_num_timeout=self.cluster.timeouts)
                executor.update_parameters(**self.parameters(array[0][0]))
                calls = [SlurmJob(str(file.path)) for _, file in array]
                try:
                    jobs = _submit(executor, calls)
                except FailedJobError as error:
                    reason = " ".join(str(error).replace("sbatch: error: ", "").split())
                    raise UserError(f"cluster=slurm: sbatch refuses the job: {reason}") from error
                self.names += [str(job.job_id) for job in jobs]

    def parameters(self, one: Pack[object]) -> dict[str, Any]:
        """Return what submitit is to ask of sbatch for a job."""
        asked = one.resources
        told = {
            "job_name": f"espalier-{one.model}",
            "time": asked.minutes,
            "mem": f"{math.ceil(asked.memory / 2**20)}M",
            "cpus_per_task": asked.cpus,
            "gpus_per_node": asked.gpus or None,
            "partition": asked.partition,
            # SLURM tells up to a minute early; a short job is told after half of its time at the soonest.
            "signal_delay_s": min(self.cluster.grace, 30 * asked.minutes),
            "array_parallelism": self.cluster.array_parallelism,
            "setup": [f'export PYTHONPATH={shlex.quote(str(ROOT))}:"$PYTHONPATH"'],
            "additional_parameters": {"requeue": True, **self.cluster.options},
        }
        return {name: value for name, value in told.items() if value is not None}

    def states(self, names: Sequence[str]) -> Mapping[str, State] | None:
        """Return the state of each job; None where SLURM does not answer."""
        arrays = sorted({name.partition("_")[0] for name in names})
        asked = ("squeue", "-h", "-a", "-r", "-t", "all", "-j", ",".join(arrays), "-o", "%i|%T|%r")
        try:
            lines = _ask(*asked).splitlines()
        except SlurmSilent as error:
            # Of a single job that SLURM has forgotten; of several it lists those that it knows.
            if "Invalid job id" not in str(error):
                return None
            lines = []
        found = {}
        for line in lines:
            name, state, reason = line.split("|", 2)
            found[name] = State(state, reason)
        return {name: found.get(name, State("ENDED")) for name in names}

    def stop(self) -> str:
        """Leave the jobs where they are."""
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
    # What sbatch says comes back in the error, and would stand there twice.
    with contextlib.redirect_stderr(io.StringIO()), executor.batch():
        jobs = [executor.submit(call) for call in calls]
    return jobs


def _ask(*command: str) -> str:
    """Return what a command of SLURM prints; raises SlurmSilent."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"cluster=slurm: {command[0]} does not answer") from error
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise SlurmSilent(f"cluster=slurm: {command[0]} fails: {reason}")
    return done.stdout
