"""What killed writers leave in the folder of a run, and when it may go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from espalier.harness.store.files import hosts
from espalier.harness.store.files.lease import LEASE, LONG, Terms, file_time, stale_successors

#: A file that is being written: `.<name>-<kernel>-<unique>` (harness/store/files/durable.py). Earlier versions named
#: no kernel.
TEMPORARY = re.compile(r"\.(?P<name>.+?)(-(?P<kernel>[0-9a-f]{8}))?-[0-9a-f]{32}")


def temporaries(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the temporary files of a folder, each with the kernel of its writer; None where the name says none."""
    for path in folder.iterdir():
        found = TEMPORARY.fullmatch(path.name)
        if found:
            yield path, found["kernel"]


def sweep(folder: Path, terms: Terms, alone: bool) -> list[Path]:
    """Remove the files of a run that its owner may remove, whose writers are dead or came too late; return their paths.

    Args:
        folder: of the run, whose lease is held.
        terms: one of another machine is dead if its file is ten times as old as a lease may be silent.
        alone: whether no other process of this machine can write here: those of this machine are dead then.
    """
    gone = stale_successors(folder / LEASE)
    for path in gone:
        path.unlink(missing_ok=True)
    for path, kernel in sorted(temporaries(folder), key=lambda one: one[0]):
        here = alone and kernel == hosts.kernel()
        if here or _age(path) > LONG * terms.expiry:
            path.unlink(missing_ok=True)
            gone.append(path)
    return gone


def _age(path: Path) -> float:
    try:
        return file_time(path.parent) - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
