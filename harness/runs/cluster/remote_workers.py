"""Runs jobs on the workers of a Dask or Ray cluster, `cluster=joblib cluster.backend=dask`, by joblib's own backends.

The cluster finds a worker for each job, and another one when it loses that worker; the job then resumes. Apart from
the call, a command and its jobs share files only: a job's own show its state, and a file `stop` next to them ends it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from socket import create_connection
from typing import Any
from urllib.parse import urlsplit

from espalier.harness.errors import UserError, first_words, foreign
from espalier.harness.paths import child_path
from espalier.harness.runs.cluster.job_file import PATIENCE, JobFile, JobGroup, JobState, run_job
from espalier.harness.runs.cluster.resources import ClusterSpec

#: Seconds in which a scheduler has to answer.
MAX_WAIT = 5.0

#: How often Ray starts a job again that lost its worker, as often as Dask does by default.
LOSSES = 3


#: A client, which closes itself at the end of a block, the options of joblib's backend, and the jobs that fit at once.
Connection = tuple[AbstractContextManager[Any], Mapping[str, Any], int]


def connect_dask(address: str, cpus: int, gpus: int) -> Connection:
    """Return the connection to a scheduler of Dask; a job takes one thread of a worker, with all that the worker sees.

    Raises:
        UserError: jobs that use GPUs would share them.
    """
    # Imported here: an extra.
    from distributed import Client

    # A lost scheduler is the error of the call; the library prints its trace as well.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    client = Client(address, timeout=MAX_WAIT, set_as_default=False)
    threads = client.nthreads().values()
    if gpus and max(threads, default=1) > 1:
        with client:
            raise UserError(
                f"cluster.backend=dask: {max(threads)} jobs at once would share the GPUs of one worker; valid: workers "
                "of one thread (dask worker --nthreads 1)"
            )
    return client, {"client": client}, sum(threads)


def connect_ray(address: str, cpus: int, gpus: int) -> Connection:
    """Return the connection to a cluster of Ray, which gives each job its cores and GPUs."""
    # Imported here: an extra.
    import ray
    from ray.util.joblib import register_ray

    register_ray()
    variables = {"env_vars": child_path()}
    client = ray.init(
        address, runtime_env=variables, logging_level=logging.ERROR, log_to_driver=False
    )
    needs = {name: need for name, need in {"CPU": cpus, "GPU": gpus}.items() if need}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(name, 0) // needs[name]) for name in needs) for node in nodes)
    options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": LOSSES}
    return client, {"ray_remote_args": options}, room


#: By backend: how to connect, and the variable that names the cluster where no setting does.
CLUSTERS: Mapping[str, tuple[Callable[[str, int, int], Connection], str]] = {
    "dask": (connect_dask, "DASK_SCHEDULER_ADDRESS"),
    "ray": (connect_ray, "RAY_ADDRESS"),
}


@dataclass
class RemoteWorkers:
    """Runs jobs as tasks of one call of joblib, in a thread.

    Args:
        cluster: the user's settings.
    """

    cluster: ClusterSpec
    names: list[str] = field(default_factory=list)
    _files: dict[str, JobFile] = field(default_factory=dict)
    _errors: list[Any] = field(default_factory=list)
    _stop: Path = field(init=False)
    _client: AbstractContextManager[Any] = field(init=False)
    _options: Mapping[str, Any] = field(init=False)
    _room: int = field(init=False)
    _call: AsyncResult[None] = field(init=False)

    def check(self, packs: Sequence[JobGroup[object]]) -> None:
        """Raise UserError if no cluster answers, or if it has no room for two jobs of the largest size."""
        backend = self.cluster.backend
        connect, variable = CLUSTERS[backend]
        address = self.cluster.address or os.environ.get(variable)
        if not address:
            raise UserError(
                f"cluster.address=None: {variable} names no cluster of cluster.backend={backend} either; valid: "
                "<host>:<port> of its scheduler"
            )
        cpus, gpus = (
            max(getattr(job.resources, name) for job in packs) for name in ("cpus", "gpus")
        )
        with foreign(
            f"cluster.address={address}: no cluster of {backend} answers",
            "<host>:<port> of its scheduler",
            (RuntimeError,),
        ):
            # Both libraries wait for minutes, or print what they try.
            place = urlsplit(address if "://" in address else f"//{address}")
            create_connection((place.hostname or "", place.port or 0), MAX_WAIT).close()
            self._client, self._options, self._room = connect(address, cpus, gpus)
        # joblib runs a single job at a time in this process.
        if self._room < 2:
            with self._client:
                raise UserError(
                    f"cluster.address={address}: its workers have room for {self._room} jobs of {cpus} CPUs "
                    f"and {gpus} GPUs; valid: room for two, or cluster.cpus and cluster.gpus for smaller jobs"
                )

    def start(self, packs: Sequence[JobGroup[object]], files: Sequence[JobFile]) -> None:
        """Start the jobs in their order."""
        # Imported here: only starting workers needs it.
        from joblib import Parallel, delayed, parallel_config

        self._files = {file.path.stem: file for file in files}
        self.names += self._files
        self._stop = files[0].path.with_name("stop")
        calls = [delayed(run_job)(file, {}, self._stop.exists) for file in files]
        at_once = min(self._room, max(len(calls), 2))

        def run_all() -> None:
            try:
                # Ray prints failures on standard output, also when it only ends its workers.
                with (
                    redirect_stdout(StringIO()),
                    self._client,
                    parallel_config(self.cluster.backend, **self._options),
                ):
                    Parallel(at_once, batch_size=1, pre_dispatch=self.cluster.workers or "all")(
                        calls
                    )
            finally:
                self._stop.touch()

        # Its thread does not keep the process from ending.
        self._call = ThreadPool(1).apply_async(run_all, error_callback=self._errors.append)

    def states(self, names: Sequence[str]) -> Mapping[str, JobState]:
        """Return the state of each job, with the error that ended all."""
        files = {name: self._files[name] for name in names}
        ended = {name for name, file in files.items() if file.ended() is not None}
        if len(ended) == len(files):
            self._call.wait(PATIENCE)
        if self._call.ready():
            return dict.fromkeys(names, JobState("ENDED", *map(first_words, self._errors)))
        begun = {
            name: "RUNNING" if file.log.exists() else "PENDING" for name, file in files.items()
        }
        return {name: JobState("ENDED" if name in ended else begun[name]) for name in names}

    def stop(self) -> str:
        """End all jobs; return a line if a worker has not ended its job in time."""
        self._stop.touch()
        self._call.wait(PATIENCE)
        return "" if self._call.ready() else f"jobs end once their workers see {self._stop}"
