"""SHA-256 of files and of plain data: what run keys and calibration files are named after."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Digests:
    """SHA-256 of files, remembered by path, size and time of change so that a sweep reads each weight file once."""

    _known: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def file(self, path: Path) -> str:
        """Return the SHA-256 of one file as hex. Cost: one read of the file, once."""
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._known:
            with path.open("rb") as stream:
                self._known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self._known[key]

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, the first time; for what is read out of files and does not change in a command."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def files(self, paths: Iterable[Path], root: Path) -> str:
        """Return one digest of several files' names (relative to `root`) and contents, in whatever order they come."""
        listing = sorted((path.relative_to(root).as_posix(), self.file(path)) for path in paths)
        return digest(listing)


def digest(content: object) -> str:
    """Return the SHA-256 of plain data as hex, whatever the order of its keys; NaN is refused with ValueError."""
    # NaN is refused: it is not equal to itself, so no key could ever be found again.
    canonical = json.dumps(
        content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
