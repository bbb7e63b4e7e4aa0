"""Files written by other programs: read without blocking on pipes, and parsed without NaN and infinity."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it does not exist, or cannot be read.
        ValueError: it is a pipe, a device or a folder; reading such may never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("not a file")
    return path.read_bytes()


def read_json(path: Path, largest: float = math.inf) -> Any:
    """Return the content of a JSON file.

    Args:
        path: the file.
        largest: number of bytes that it may have.

    Raises:
        OSError, ValueError, RecursionError: as `read_bytes`, or it is too large, or no JSON.
    """
    if path.stat().st_size > largest:
        raise ValueError(f"it has more than {largest / 2**20:g} MiB")
    return json.loads(read_bytes(path), parse_constant=refuse_constant)


def refuse_constant(name: str) -> Any:
    """Refuse NaN and infinity, which Python reads but JSON does not have."""
    raise ValueError(f"it holds {name}, which is not JSON")
