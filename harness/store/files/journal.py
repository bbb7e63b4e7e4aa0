"""The journal of a run: one JSON line for each finished sample, flushed to the disk before the sample counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError, tell_once
from espalier.harness.store.files import durable


class Journal:
    """Append-only JSON lines on disk, one object for each finished sample.

    Each process of a run appends to a file of its own, and all files are one journal: `journal.jsonl` of the first
    process, `journal.rank1.jsonl` of the second, and so on. Whoever takes a run over from a machine that may still
    write begins files of its own, `journal.take1.jsonl`: appending is atomic on one machine alone.
    """

    def __init__(self, path: Path, own: Path | None = None) -> None:
        """Name the first file, and the one that is appended to if it is another; nothing is opened before that."""
        self.path = path
        self._own = own or path

    def of_rank(self, rank: int) -> Journal:
        """Return the same journal for a process to append to, in the newest set of files."""
        own = max((self.path, *self._taken()), key=lambda path: (len(path.name), path.name))
        return Journal(self.path, own.with_suffix(f".rank{rank}{own.suffix}") if rank else own)

    def begin_anew(self) -> None:
        """Begin a new set of files for whoever asks `of_rank` from now on.

        Raises:
            StoreLost: the disk does not take a file.
        """
        number = len(self._taken()) + 1
        durable.append(self.path.with_suffix(f".take{number}{self.path.suffix}"), "")

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Write the entries and return when they are on the disk. Cost: one write and one fsync.

        Raises:
            ValueError: an entry holds NaN or infinity, which JSON lines cannot carry.
            StoreLost: the disk is full or cannot be written.
        """
        lines = "".join(json.dumps(dict(entry), allow_nan=False) + "\n" for entry in entries)
        durable.append(self._own, lines)

    def entries(self) -> list[dict[str, Any]]:
        """Return every whole entry of all files, of each in the order of writing.

        Damaged lines are left out and counted in one line on stderr; a torn last line, which a killed run leaves, goes
        without saying.

        Raises:
            UserError: a file of the journal cannot be read.
        """
        return [entry for path in self.files() for entry in _entries(path)]

    def clear(self) -> None:
        """Forget all entries of all processes."""
        for path in self.files():
            path.unlink()

    def take_over(self, other: Journal) -> None:
        """Become what another journal holds, in one step: whoever reads sees the old entries or the new ones.

        The other one stays as it is.
        """
        lines = "".join(f"{json.dumps(entry)}\n" for entry in other.entries())
        former = [path for path in self.files() if path != self.path]
        durable.replace(self.path, lines.encode())
        for path in former:
            path.unlink()

    def files(self) -> list[Path]:
        """Return the files that are there, the first process's first."""
        others = sorted(self.path.parent.glob(f"{self.path.stem}.*{self.path.suffix}"))
        return [path for path in (self.path, *others) if path.exists()]

    def _taken(self) -> list[Path]:
        names = f"{self.path.stem}.take*{self.path.suffix}"
        return [path for path in self.path.parent.glob(names) if ".rank" not in path.name]

    def __len__(self) -> int:
        """Return the number of whole entries."""
        return len(self.entries())


def _entries(path: Path) -> list[dict[str, Any]]:
    whole, damaged = [], 0
    *lines, last = read_lines(path)
    for line in filter(None, (*lines, last)):
        entry = parse(line)
        if entry is None:
            damaged += line is not last
        else:
            whole.append(entry)
    if damaged:
        tell_once(f"store: {path}: {damaged} damaged lines are left out")
    return whole


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the entry that a line holds; None if it is damaged or torn."""
    try:
        # The closing brace is the last byte of an entry, so a torn line is never valid JSON.
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file; the last one is empty unless it is torn. Raises UserError if it cannot be read."""
    return _bytes(path).split(b"\n")


def _bytes(path: Path) -> bytes:
    # A pipe would never end.
    if not path.is_file():
        raise UserError(f"store: {path} is not a file; remove it")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"store: {path} cannot be read: {error.strerror or error}") from error
