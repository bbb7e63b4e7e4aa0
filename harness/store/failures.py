"""Why a run has no row: `<run>/failed.json`, written when it fails and gone when it succeeds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, StoreLost
from espalier.harness.store.files import durable, hosts
from espalier.harness.store.files.untrusted_json import read_json

NAME = "failed.json"


@contextmanager
def noted(folder: Path, argv: Sequence[str], quiet: bool = False) -> Iterator[None]:
    """Note in the folder of a run what the block raises, and raise it again; an interruption is no failure.

    Args:
        folder: of the run.
        argv: the command line that it belongs to.
        quiet: whether another process of the run notes it.
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
                **hosts.describe(),
            }
            # The error itself is what must be told.
            with suppress(StoreLost):
                durable.replace(folder / NAME, f"{json.dumps(failure, indent=1)}\n".encode())
        raise


def clear(folder: Path) -> None:
    """Forget that a run failed."""
    (folder / NAME).unlink(missing_ok=True)


def read(folder: Path) -> dict[str, Any] | None:
    """Return why a run failed: `cause`, `error`, `when`, who; None if it did not, or nobody can tell."""
    try:
        told = read_json(folder / NAME)
    except FOREIGN:
        return None
    return told if isinstance(told, dict) and isinstance(told.get("cause"), str) else None
