"""Which machine this is, and which process on it: what leases and temporary files say of their owner."""

from __future__ import annotations

import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any
from uuid import getnode

#: What SLURM tells a job of itself: the array's number and the place in it, or the job's number alone.
ARRAY = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")


@cache
def kernel() -> str:
    """Return 8 letters that name the running kernel: processes that share it see each other's locks, no others do.

    Host names will not do: containers of one machine have several, and two clusters may have the same.
    """
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:  # no Linux
        name = f"{getnode():012x}"
    return name.replace("-", "")[:8]


def describe() -> dict[str, Any]:
    """Return who this process is: host name, kernel, process, the time, and the SLURM job if it belongs to one."""
    array = "_".join(filter(None, map(os.environ.get, ARRAY)))
    return {
        "host": platform.node(),
        "kernel": kernel(),
        "pid": os.getpid(),
        "began": time.time(),
        "job": array or os.environ.get("SLURM_JOB_ID"),
    }
