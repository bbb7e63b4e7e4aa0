"""Who computes a run: one process of one machine, by a lock of the system; one machine of several, by a lease.

The lock ends with its process, however that ends, so a run that died here is free at once. One that died elsewhere is
free when its lease has expired (harness/store/files/lease.py). Where neither can be known, because the file system
takes no
files or an owner slept for longer than its lease, two commands compute the same run: they append to journals of their
own, and either's row is whole.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from espalier.harness.errors import StoreLost
from espalier.harness.store.debris import sweep
from espalier.harness.store.files.journal import Journal
from espalier.harness.store.files.lease import LEASE, Terms, take

#: What a file system says that has no locks, or that takes no file for one.
WITHOUT_LOCKS = frozenset(
    (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EROFS, errno.EACCES)
)


def size(folder: Path) -> int:
    """Return the bytes of a run's journals: how much an owner had when it began, and has now."""
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


@contextmanager
def claim(
    folder: Path, patience: float, terms: Terms, journals: Iterable[Journal]
) -> Iterator[bool]:
    """Hold a run; yields whether it is held: another process may hold it for longer than `patience` seconds.

    Whoever holds it removes what writers that were killed left in the folder. Where it is taken over from another
    machine, its journals begin new files: the former owner may yet be alive.

    Raises:
        StoreLost: the disk does not take the files of lock and lease.
    """
    with ExitStack() as held:
        try:
            got = _hold(held, folder, patience, terms, journals)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise StoreLost(
                    f"run {folder} cannot be held: {error.strerror or error}"
                ) from error
            got = True
        if not got:
            # Whoever waits may ask again before it leaves this block.
            held.close()
        yield got


def tidy(folder: Path, terms: Terms) -> None:
    """Clear away what an owner left that was killed between its row and its release, if it is known to be dead.

    Args:
        folder: of a run whose row is there.
        terms: of whoever looks.

    Cost: one look at the folder; nothing is written where nothing is left.
    """
    if any(folder.glob(f"{LEASE}*")):
        with claim(folder, 0.0, terms, ()):
            pass


def _hold(
    held: ExitStack, folder: Path, patience: float, terms: Terms, journals: Iterable[Journal]
) -> bool:
    """Get lock and lease, which `held` gives back; raises OSError where the file system takes neither."""
    lock = FileLock(folder / "lock", timeout=patience, poll_interval=0.2)
    try:
        lock.acquire()
        held.callback(lock.release)
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    had = {"journal_bytes": size(folder)}
    lease, foreign = take(folder / LEASE, terms, patience, lock.is_locked, had)
    if lease is None:
        return False
    held.callback(lease.release)
    if foreign:
        for journal in journals:
            journal.begin_anew()
    sweep(folder, terms, alone=lock.is_locked)
    return True
