"""`cluster=joblib`: parallel jobs on this machine, each with its own GPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from espalier.harness.errors import UserError
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.job_file import JobFile, JobGroup, JobState, run_job

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
        gpus: for the jobs; empty: jobs run on the CPU, whatever they request.
    """

    cluster: ClusterSpec
    gpus: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _states: dict[str, JobState] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def check(self, packs: Sequence[JobGroup[object]]) -> None:
        """Raise UserError if a job requests more GPUs than exist, or the command would not wait."""
        if not self.cluster.wait:
            raise UserError(
                "cluster.wait=False: the workers of cluster=joblib end with this command; valid: true, or cluster=slurm"
            )
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
                run_job(file, self._environment(taken, at_once), self._stopped.is_set)
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

    def _environment(self, taken: tuple[str, ...], at_once: int) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // at_once))
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        return {**variables, VISIBLE: ",".join(taken)} if self.gpus else variables
