"""Claims of a run: a file lock between the processes of one machine, a lease between machines.

The lock ends with its process, so a run is free as soon as its process on this machine died. If the process died on
another machine, the run is free when its lease has expired (harness/store/files/lease.py). If neither can be known,
because the file system takes no files or an owner slept for longer than its lease, two commands compute the same run:
each appends to its own journal, and either row is complete.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from espalier.harness.errors import StoreLost
from espalier.harness.store.files import durable
from espalier.harness.store.files.folder_checks import below
from espalier.harness.store.files.journal import Journal
from espalier.harness.store.files.lease import (
    LEASE,
    STALE_FACTOR,
    Terms,
    file_time,
    stale_successors,
    take,
)

#: A temporary file: `.<name>-<kernel>-<unique>` (harness/store/files/durable.py). Earlier versions wrote
#: no kernel.
TEMPORARY = re.compile(r"\.(?P<name>.+?)(-(?P<kernel>[0-9a-f]{8}))?-[0-9a-f]{32}")


def temporaries(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the temporary files of a folder, each with the kernel of its writer; None if the name has none."""
    for path in folder.iterdir():
        match = TEMPORARY.fullmatch(path.name)
        if match:
            yield path, match["kernel"]


def remove_debris(folder: Path, terms: Terms, sole_process: bool) -> list[Path]:
    """Remove files of dead or late writers from the folder of a run; return their paths.

    Args:
        folder: of the run; the caller holds its lease.
        terms: a writer on another machine is dead if its file is ten times older than a lease may be silent.
        sole_process: whether no other process of this machine can write here, so that earlier writers here are dead.
    """
    removed = stale_successors(folder / LEASE)
    for path in removed:
        path.unlink(missing_ok=True)
    for path, kernel in sorted(temporaries(folder), key=lambda pair: pair[0]):
        died_here = sole_process and kernel == durable.kernel()
        if died_here or _age(path) > STALE_FACTOR * terms.expiry:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _age(path: Path) -> float:
    try:
        return file_time(path.parent) - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


#: Error numbers of a file system without locks, or of one that does not take the lock file.
WITHOUT_LOCKS = frozenset(
    (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EROFS, errno.EACCES)
)


def journal_bytes(folder: Path) -> int:
    """Return the bytes of a run's journals, from which status derives its progress."""
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


@contextmanager
def claim(
    folder: Path, patience: float, terms: Terms, journals: Iterable[Journal]
) -> Iterator[bool]:
    """Claim a run; yields False if another process still holds it after `patience` seconds.

    The owner removes temporary files that killed writers left in the folder. If the run is taken over from another
    machine, its journals start new files: the former owner may still be alive.

    Raises:
        StoreLost: the disk does not take the files of lock and lease.
        UserError: the folder is a link.
    """
    below(folder.parents[1], folder.parent.name, folder.name)
    with ExitStack() as resources:
        try:
            claimed = _acquire(resources, folder, patience, terms, journals)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise StoreLost(
                    f"run {folder} cannot be claimed: {error.strerror or error}"
                ) from error
            claimed = True
        if not claimed:
            # A waiting caller may claim again before it leaves this block.
            resources.close()
        yield claimed


def tidy(folder: Path, terms: Terms) -> None:
    """Remove the lock files of an owner that was killed between its row and its release, if it is known to be dead.

    Args:
        folder: of a run that has a row.
        terms: of this process.

    Cost: one look at the folder; nothing is written if nothing is left over.
    """
    if any(folder.glob(f"{LEASE}*")):
        with claim(folder, 0.0, terms, ()):
            pass


def _acquire(
    resources: ExitStack, folder: Path, patience: float, terms: Terms, journals: Iterable[Journal]
) -> bool:
    """Get lock and lease, which `resources` releases; raises OSError if the file system takes neither."""
    lock = FileLock(folder / "lock", timeout=patience, poll_interval=0.2)
    try:
        lock.acquire()
        resources.callback(lock.release)
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    extra = {"journal_bytes": journal_bytes(folder)}
    lease, foreign = take(folder / LEASE, terms, patience, lock.is_locked, extra)
    if lease is None:
        return False
    resources.callback(lease.release)
    if foreign:
        for journal in journals:
            journal.start_new_files()
    remove_debris(folder, terms, sole_process=lock.is_locked)
    return True
