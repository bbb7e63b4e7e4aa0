"""Files that survive the death of process and machine: written in full, flushed, then made visible; their writers."""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from espalier.harness.errors import StoreLost

#: Error numbers of a folder that this user may not write, now or later.
REFUSED = frozenset((errno.EACCES, errno.EPERM))

#: Mode of new files; the umask decides who else may write them, as for folders.
MODE = 0o666


def append(path: Path, lines: str) -> None:
    """Write whole lines to the end of a file and return when they are on the disk; a missing file is created.

    Raises:
        StoreLost: the disk is full or cannot be written, or the file is a link. Earlier lines are intact; the last new
            one may be torn.

    Cost: one write and one fsync, and one more fsync if the file is new.
    """
    with _store_errors(path):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, MODE)
        try:
            size = os.fstat(file).st_size
            # First end the torn line of a killed run, or the new line would be appended to it.
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            _write_all(file, (("\n" if torn else "") + lines).encode())
            os.fsync(file)
        finally:
            os.close(file)
        if size == 0:
            sync_folder(path.parent)


def replace(path: Path, content: bytes) -> None:
    """Write a temporary file next to `path`, flush it, rename it into place and flush the folder: all or nothing.

    Raises:
        StoreLost: the disk is full or cannot be written; the former file at `path` is unchanged.
    """
    # If the writer is killed, the name still shows on which machine it ran.
    temporary = path.with_name(f".{path.name}-{kernel()}-{uuid4().hex}")
    with _store_errors(path):
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
            try:
                _write_all(file, content)
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and return when its name is on the disk; an existing folder is not touched.

    Raises:
        StoreLost: the disk is full or cannot be written.
    """
    with _store_errors(folder):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, data: bytes) -> None:
    # One call appends atomically; the loop only completes a write that a nearly full disk cut short.
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "finished samples are kept, the same command goes on from them"
        if error.errno == errno.ELOOP:
            advice = "valid: a file in place of the link"
        if error.errno in REFUSED:
            advice = "the store's content is kept; valid: a store that this user may write"
        raise StoreLost(
            f"store: {path} cannot be written: {error.strerror or error}; {advice}"
        ) from error


#: Variables that SLURM sets in an array job: the array's number and the job's index in it.
ARRAY = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")


@cache
def kernel() -> str:
    """Return 8 letters that identify the running kernel: only processes that share it see each other's locks.

    Host names are not enough: containers of one machine have several, and two clusters may use the same.
    """
    name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    return name.replace("-", "")[:8]


def this_process() -> dict[str, Any]:
    """Return the identity of this process: host name, kernel, process id, time, and the SLURM job if there is one."""
    array = "_".join(filter(None, map(os.environ.get, ARRAY)))
    return {
        "host": platform.node(),
        "kernel": kernel(),
        "pid": os.getpid(),
        "began": time.time(),
        "job": array or os.environ.get("SLURM_JOB_ID"),
    }
