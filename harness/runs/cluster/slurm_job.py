"""What a job does: it runs `run.py --cells <file>` until its cells are done or it is told to stop.

The cells run in a process of their own, so that a job is the same code as a local sweep, and a process that is killed
leaves somebody who says so.
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

from espalier.harness.paths import ROOT
from espalier.harness.runs.cluster.job_file import JobFile

#: Seconds that a job has to end after SIGTERM: a batch of answers, then its journal is whole.
PATIENCE = 30.0

#: The longest that a job which SLURM asked to end waits for SLURM to end it: one that leaves by itself would count as
#: finished, and would not be queued again after a preemption.
HELD = 3600.0

#: What `scontrol requeue`, `scancel` and the end of a process by SIGTERM look like from outside.
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


def carry_out(
    job: JobFile, environment: Mapping[str, str], stop: Callable[[], bool] = lambda: False
) -> int:
    """Run the cells of a job that have no row yet and return the exit code, which is noted beside the file.

    Args:
        job: the cells.
        environment: variables on top of this process's own.
        stop: asked twice a second whether to end early.
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
    """Start run.py on the cells of a job; what it prints is appended to the job's log."""
    with job.log.open("ab") as log:
        return subprocess.Popen(
            # The shell's `trap` outlives `exec`: SLURM signals every process of a step, and this one is told by us.
            ["/bin/sh", "-c", 'trap "" USR2; exec "$@"', "sh", *_command(job.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
        )


def _command(path: Path) -> list[str]:
    return [sys.executable, str(ROOT / "run.py"), "--cells", str(path)]


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
    """What submitit calls in a job of SLURM; after a preemption or a time limit it is queued again as it is."""

    path: str
    _asked: bool = field(default=False, init=False)

    def __call__(self) -> int:
        """Run the cells and return the exit code."""
        former = signal.signal(signal.SIGTERM, self._told)
        try:
            code = carry_out(JobFile(Path(self.path)), {})
        finally:
            signal.signal(signal.SIGTERM, former)
        end = time.monotonic() + HELD
        while self._asked and code in TERMINATED and time.monotonic() < end:
            time.sleep(1.0)
        return code

    def checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Return what is to run when SLURM starts the job again; the cells end when this process leaves."""
        # A job that is not asked to come again does without.
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(SlurmJob(self.path))

    def _told(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
