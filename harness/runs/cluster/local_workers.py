"""`cluster=joblib`: jobs beside each other on this machine, each on GPUs of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from espalier.harness.errors import UserError
from espalier.harness.runs.cluster.cluster_spec import ClusterSpec
from espalier.harness.runs.cluster.job_file import JobFile
from espalier.harness.runs.cluster.job_groups import Pack
from espalier.harness.runs.cluster.job_state import State
from espalier.harness.runs.cluster.slurm_job import carry_out

VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # takes seconds, and a queue needs no GPU here

    count = torch.cuda.device_count()
    given = os.environ.get(VISIBLE)
    named = [str(number) for number in range(count)] if given is None else given.split(",")
    return tuple(name.strip() for name in named[:count])


class Devices:
    """GPUs that are handed out to jobs and given back."""

    def __init__(self, names: Sequence[str]) -> None:
        """Take the names of all of them."""
        self._free = list(names)
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[tuple[str, ...]]:
        """Hold `count` GPUs, as soon as so many are free; never more than there are."""
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
class Workers:
    """Runs jobs in threads, each of which waits for the process of its job.

    Args:
        cluster: how many at once.
        gpus: to deal out; none: jobs run on the CPU, whatever they ask for.
    """

    cluster: ClusterSpec
    gpus: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _states: dict[str, State] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def check(self, packs: Sequence[Pack[object]]) -> None:
        """Raise UserError where a job asks for more GPUs than there are, or the command would not wait."""
        if not self.cluster.wait:
            raise UserError(
                "cluster.wait=False: the workers of cluster=joblib end with this command; valid: true, or cluster=slurm"
            )
        for one in packs:
            if self.gpus and one.resources.gpus > len(self.gpus):
                raise UserError(
                    f"cluster.gpus={one.resources.gpus} (model={one.model}): this machine has {len(self.gpus)} GPUs; "
                    f"valid: at most {len(self.gpus)}"
                )

    def start(self, packs: Sequence[Pack[object]], files: Sequence[JobFile]) -> None:
        """Start the jobs in their order."""
        self.names += [file.path.stem for file in files]
        self._states = dict.fromkeys(self.names, State("PENDING"))
        work = list(zip(self.names, packs, files, strict=True))
        at_once = self.at_once(packs)
        pool = Devices(self.gpus)

        def run(name: str, one: Pack[object], file: JobFile) -> None:
            if self._stopped.is_set():
                return
            with pool.take(one.resources.gpus if self.gpus else 0) as taken:
                self._states[name] = State("RUNNING")
                carry_out(file, self._environment(taken, at_once), self._stopped.is_set)
            self._states[name] = State("ENDED")

        def run_all() -> None:
            # Only who starts workers pays for it.
            from joblib import Parallel, delayed

            Parallel(n_jobs=at_once, backend="threading")(delayed(run)(*one) for one in work)

        self._thread = threading.Thread(target=run_all, name="jobs")
        self._thread.start()

    def states(self, names: Sequence[str]) -> Mapping[str, State]:
        """Return the state of each job; one whose worker is gone has ended."""
        alive = self._thread is not None and self._thread.is_alive()
        return {name: self._states[name] if alive else State("ENDED") for name in names}

    def stop(self) -> str:
        """End all jobs and wait for them; return what is to be said of that."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        return ""

    def at_once(self, packs: Sequence[Pack[object]]) -> int:
        """Return how many jobs run beside each other."""
        most = max(one.resources.gpus for one in packs)
        if self.cluster.workers is not None:
            room = self.cluster.workers
        elif self.gpus and most:
            room = len(self.gpus) // most
        else:
            room = (os.cpu_count() or 1) // max(one.resources.cpus for one in packs)
        return max(1, min(room, len(packs)))

    def _environment(self, taken: tuple[str, ...], at_once: int) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // at_once))
        told = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        return {**told, VISIBLE: ",".join(taken)} if self.gpus else told
