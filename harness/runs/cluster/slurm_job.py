"""The work of a job: run `espalier run --cells <file>` until its cells are done or it gets a signal to stop.

The cells run in a separate process, so that a job is the same code as a local sweep, and a killed process is noticed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from espalier.harness.paths import child_path
from espalier.harness.runs.cluster.job_file import JobFile

#: Seconds that a job has to end after SIGTERM: enough to finish a batch and its journal.
PATIENCE = 30.0

#: Seconds that a job waits for SLURM to end it after requesting that: a job that exits by itself would count as
#: finished, and would not be queued again after a preemption.
MAX_HOLD = 3600.0

#: Exit codes after `scontrol requeue`, `scancel` and SIGTERM.
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


def run_job(
    job: JobFile, environment: Mapping[str, str], stop: Callable[[], bool] = lambda: False
) -> int:
    """Run the cells of a job that have no row yet; return the exit code, which is also stored next to the file.

    Args:
        job: the cells.
        environment: variables in addition to this process's own.
        stop: called twice a second; returns whether to end early.
    """
    job.begin()
    if all(entry.done for entry in job.entries()):
        job.end(0)
        return 0
    with start(job, environment) as process:
        try:
            while process.poll() is None:
                if stop():
                    _end(process)
                _wait(process, 0.5)
        except BaseException:
            _end(process)
            raise
    job.end(process.returncode)
    return process.returncode


def start(job: JobFile, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `espalier run` on the cells of a job; its output is appended to the job's log."""
    with job.log.open("ab") as log:
        return subprocess.Popen(
            # The shell's `trap` outlives `exec`: SLURM signals every process of a step, but we stop this one ourselves.
            ["/bin/sh", "-c", 'trap "" USR2; exec "$@"', "sh", *_command(job.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **child_path(), **environment},
        )


def _command(path: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "espalier", "run", "--cells", str(path)]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        if not _wait(process, PATIENCE):
            process.kill()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@dataclass
class SlurmJob:
    """The callable that submitit runs in a job of SLURM; after a preemption or a time limit it is queued again."""

    path: str
    _terminating: bool = field(default=False, init=False)

    def __call__(self) -> int:
        """Run the cells and return the exit code."""
        former = signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            code = run_job(JobFile(Path(self.path)), {})
        finally:
            signal.signal(signal.SIGTERM, former)
        end = time.monotonic() + MAX_HOLD
        while self._terminating and code in TERMINATED and time.monotonic() < end:
            time.sleep(1.0)
        return code

    def checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Return the call to run when SLURM starts the job again; the cells end when this process exits."""
        # Imported here: most jobs are never queued again.
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(SlurmJob(self.path))

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminating = True
