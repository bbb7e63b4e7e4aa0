"""Identity of this machine and process, as leases and temporary files record it."""

from __future__ import annotations

import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any
from uuid import getnode

from espalier.harness.errors import FOREIGN

#: Variables that SLURM sets in an array job: the array's number and the job's index in it.
ARRAY = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")


@cache
def kernel() -> str:
    """Return 8 letters that identify the running kernel: only processes that share it see each other's locks.

    Host names are not enough: containers of one machine have several, and two clusters may use the same.
    """
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except FOREIGN:  # not Linux
        name = f"{getnode():012x}"
    return name.replace("-", "")[:8]


def describe() -> dict[str, Any]:
    """Return the identity of this process: host name, kernel, process id, time, and the SLURM job if there is one."""
    array = "_".join(filter(None, map(os.environ.get, ARRAY)))
    return {
        "host": platform.node(),
        "kernel": kernel(),
        "pid": os.getpid(),
        "began": time.time(),
        "job": array or os.environ.get("SLURM_JOB_ID"),
    }
