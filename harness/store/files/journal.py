"""The journal of a run: one JSON line for each finished sample, flushed to the disk before the sample counts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, UserError, foreign, tell_once
from espalier.harness.store.files import durable


class Journal:
    """Append-only JSON lines on disk, one object per finished sample.

    Each process of a run appends to its own file, and all files form one journal: `journal.jsonl` of the first process,
    `journal.rank1.jsonl` of the second, and so on. A process that takes a run over from a machine that may still write
    starts a new set of files, `journal.take1.jsonl`: appending is atomic on one machine only.
    """

    def __init__(self, path: Path, output: Path | None = None) -> None:
        """Name the first file, and the output file if it differs; nothing is opened yet."""
        self.path = path
        self._output = output or path

    def of_rank(self, rank: int) -> Journal:
        """Return the same journal with the output file of one process, in the newest set of files."""
        newest = max((self.path, *self._take_files()), key=lambda path: (len(path.name), path.name))
        return Journal(
            self.path, newest.with_suffix(f".rank{rank}{newest.suffix}") if rank else newest
        )

    def start_new_files(self) -> None:
        """Start a new set of files for later calls of `of_rank`.

        Raises:
            StoreLost: the disk does not take a file.
        """
        number = len(self._take_files()) + 1
        durable.append(self.path.with_suffix(f".take{number}{self.path.suffix}"), "")

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Write the entries and return when they are on the disk. Cost: one write and one fsync.

        Raises:
            ValueError: an entry holds NaN or infinity, which JSON lines cannot carry.
            StoreLost: the disk is full or cannot be written.
        """
        lines = "".join(json.dumps(dict(entry), allow_nan=False) + "\n" for entry in entries)
        durable.append(self._output, lines)

    def entries(self) -> list[dict[str, Any]]:
        """Return every intact entry of all files, in the order of writing within each file.

        Damaged lines are left out and counted in one line on stderr; a torn last line, which a killed run leaves, is
        left out silently.

        Raises:
            UserError: a file of the journal cannot be read.
        """
        return [entry for path in self.files() for entry in _entries(path)]

    def clear(self) -> None:
        """Remove all entries of all processes."""
        for path in self.files():
            path.unlink()

    def replace_by(self, source: Journal) -> None:
        """Replace the content by that of another journal in one step: readers see the old entries or the new ones.

        The other journal is not changed.
        """
        lines = "".join(f"{json.dumps(entry)}\n" for entry in source.entries())
        former = [path for path in self.files() if path != self.path]
        durable.replace(self.path, lines.encode())
        for path in former:
            path.unlink()

    def files(self) -> list[Path]:
        """Return the existing files, the first process's first."""
        name = re.compile(rf"{re.escape(self.path.stem)}(\.take\d+)?(\.rank\d+)?\.jsonl")
        further = [path for path in self.path.parent.glob("*") if name.fullmatch(path.name)]
        return sorted(filter(Path.exists, further), key=lambda path: (path != self.path, path))

    def _take_files(self) -> list[Path]:
        names = f"{self.path.stem}.take*{self.path.suffix}"
        return [path for path in self.path.parent.glob(names) if ".rank" not in path.name]

    def __len__(self) -> int:
        """Return the number of intact entries."""
        return len(self.entries())


def _entries(path: Path) -> list[dict[str, Any]]:
    entries, damaged = [], 0
    *lines, last = read_lines(path)
    for line in filter(None, (*lines, last)):
        entry = parse(line)
        if entry is None:
            damaged += line is not last
        else:
            entries.append(entry)
    if damaged:
        tell_once(f"store: {path}: {damaged} damaged lines are left out")
    return entries


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line, or None if the line is damaged or torn."""
    try:
        # The closing brace is the last byte of an entry, so a torn line is never valid JSON.
        entry = json.loads(line)
    except FOREIGN:
        return None
    return entry if isinstance(entry, dict) else None


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file; the last is empty unless it is torn. Raises UserError if it cannot be read."""
    return _bytes(path).split(b"\n")


def _bytes(path: Path) -> bytes:
    # Reading a pipe would never end.
    if not path.is_file():
        raise UserError(f"store: {path} is not a file; remove it")
    with foreign(f"store: {path} cannot be read", "the right to read it"):
        return path.read_bytes()
