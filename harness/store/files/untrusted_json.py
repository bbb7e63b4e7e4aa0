"""Files that others wrote: read without waiting for what is none, and parsed without numbers that JSON lacks."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any


def read_bytes(path: Path) -> bytes:
    """Return what is in a file.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is a pipe, a device or a folder; reading such may never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("not a file")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Return what a file of JSON holds; raises what `read_bytes` does, ValueError and RecursionError."""
    return json.loads(read_bytes(path), parse_constant=refuse_constant)


def refuse_constant(name: str) -> Any:
    """Refuse NaN and infinity, which Python reads and JSON has not."""
    raise ValueError(f"it holds {name}, which is no JSON")
