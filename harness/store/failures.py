"""The reason why a run has no row: `<run>/failed.json`, written when it fails and removed when it succeeds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, StoreLost
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import read_json

NAME = "failed.json"


@contextmanager
def record_failure(folder: Path, argv: Sequence[str], quiet: bool = False) -> Iterator[None]:
    """Write an exception of the block to the run's folder, and raise it again; an interruption is not a failure.

    Args:
        folder: of the run.
        argv: the command line of the run.
        quiet: whether another process of the run writes the file.
    """
    try:
        yield
    except StoreLost:
        raise
    except Exception as error:
        if not quiet:
            failure = {
                "cause": " ".join(str(error).split()) or type(error).__name__,
                "error": type(error).__name__,
                "when": time.time(),
                "argv": list(argv),
                **durable.this_process(),
            }
            # The error itself must be reported, not a full disk.
            with suppress(StoreLost):
                durable.replace(folder / NAME, f"{json.dumps(failure, indent=1)}\n".encode())
        raise


def clear(folder: Path) -> None:
    """Remove the file of an earlier failure."""
    (folder / NAME).unlink(missing_ok=True)


def read(folder: Path) -> dict[str, Any] | None:
    """Return the failure of a run: `cause`, `error`, `when`, host; None if there is none or it cannot be read."""
    try:
        failure = read_json(folder / NAME)
    except FOREIGN:
        return None
    return failure if isinstance(failure, dict) and isinstance(failure.get("cause"), str) else None
