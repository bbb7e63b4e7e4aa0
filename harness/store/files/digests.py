"""Plain data of files: SHA-256 for run keys and calibration files, and JSON that other programs wrote."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Digests:
    """SHA-256 of files, cached by path, size and time of change so that a sweep reads each weight file once."""

    _file_digests: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _values: dict[Hashable, Any] = field(default_factory=dict)

    def file(self, path: Path) -> str:
        """Return the SHA-256 of one file as hex. Cost: one read of the file, once."""
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._file_digests:
            with path.open("rb") as stream:
                self._file_digests[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self._file_digests[key]

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`, computed once per name; for values read from files that do not change during a command."""
        if name not in self._values:
            self._values[name] = make()
        return self._values[name]

    def files(self, paths: Iterable[Path], root: Path) -> str:
        """Return one digest of several files' names (relative to `root`) and contents, in any order."""
        listing = sorted((path.relative_to(root).as_posix(), self.file(path)) for path in paths)
        return digest(listing)


def digest(content: object) -> str:
    """Return the SHA-256 of plain data as hex, independent of the order of its keys; NaN raises ValueError."""
    # NaN is refused: it is not equal to itself, so its key could never be looked up again.
    canonical = json.dumps(
        content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_bytes(path: Path, largest: float = math.inf) -> bytes:
    """Return the content of a file.

    Args:
        path: the file.
        largest: number of bytes that it may have.

    Raises:
        OSError: it does not exist, or cannot be read.
        ValueError: it is too large, or a pipe, a device or a folder; reading such may never end.
    """
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise ValueError("not a file")
    if state.st_size > largest:
        raise ValueError(f"it has more than {largest / 2**20:g} MiB")
    return path.read_bytes()


def read_json(path: Path, largest: float = math.inf) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError, ValueError, RecursionError: as `read_bytes`, or it is no JSON.
    """
    content = read_bytes(path, largest)
    return _decode(content.decode(json.detect_encoding(content), "surrogatepass"))


def refuse_constant(name: str) -> Any:
    """Refuse NaN and infinity, which Python reads but JSON does not have."""
    raise ValueError(f"it holds {name}, which is not JSON")


#: `json.loads` makes a decoder for each text.
_decode = json.JSONDecoder(parse_constant=refuse_constant).decode
