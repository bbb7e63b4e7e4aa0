"""Files that survive the death of process and machine: written whole, flushed, and only then made visible."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from espalier.harness.errors import StoreLost
from espalier.harness.store.files import hosts

#: What a system says that lets this user write neither now nor later.
REFUSED = frozenset((errno.EACCES, errno.EPERM))

#: Of new files; the umask says who else may write them, as it does of folders.
MODE = 0o666


def append(path: Path, lines: str) -> None:
    """Write whole lines to the end of a file and return when they are on the disk; a new file is created.

    Raises:
        StoreLost: the disk is full or cannot be written. What it took before is whole but for the last line.

    Cost: one write and one fsync, one more fsync where the file is new.
    """
    with _lost(path):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, MODE)
        try:
            size = os.fstat(file).st_size
            # A torn line of a killed run is closed off first, or the new line would be glued to it.
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            _write_all(file, (("\n" if torn else "") + lines).encode())
            os.fsync(file)
        finally:
            os.close(file)
        if size == 0:
            sync_folder(path.parent)


def replace(path: Path, content: bytes) -> None:
    """Write a file beside `path`, flush it, rename it into place and flush the folder: it appears whole or not at all.

    Raises:
        StoreLost: the disk is full or cannot be written; what was at `path` is still there.
    """
    # The name tells whoever finds it after a kill on which machine its writer was.
    temporary = path.with_name(f".{path.name}-{hosts.kernel()}-{uuid4().hex}")
    with _lost(path):
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
    """Make a folder and those above it, and return when its name is on the disk; one that is there is left alone.

    Raises:
        StoreLost: the disk is full or cannot be written.
    """
    with _lost(folder):
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
    # One call appends atomically; the loop only finishes what a nearly full disk cut short.
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _lost(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kept = "finished samples are kept, the same command goes on from them"
        if error.errno in REFUSED:
            kept = "what the store holds is kept; valid: a store that this user may write"
        reason = error.strerror or error
        raise StoreLost(f"store: {path} cannot be written: {reason}; {kept}") from error
