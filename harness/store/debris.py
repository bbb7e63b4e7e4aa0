"""Files that killed writers leave in the folder of a run, and when they may be removed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from espalier.harness.store.files import hosts
from espalier.harness.store.files.lease import (
    LEASE,
    STALE_FACTOR,
    Terms,
    file_time,
    stale_successors,
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
        died_here = sole_process and kernel == hosts.kernel()
        if died_here or _age(path) > STALE_FACTOR * terms.expiry:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _age(path: Path) -> float:
    try:
        return file_time(path.parent) - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
