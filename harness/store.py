"""The run store: `<root>/runs/<key>/{spec.json, journal*.jsonl, row.json}`, safe against crashes and second writers.

The journal takes one line for each finished sample, written with a single append and flushed to the disk, so a killed
run loses at most a torn last line. `row.json` is the only sign that a run is finished; it appears by rename.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from harness.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

#: Version of the layout of `row.json`; a reader refuses a newer one.
SCHEMA = 1


class Journal:
    """Append-only JSON lines on disk, one object for each finished sample.

    Each process of a run appends to a file of its own, and all files are one journal: `journal.jsonl` of the first
    process, `journal.rank1.jsonl` of the second, and so on.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        """Name the first process's file and the process that appends; nothing is opened before the first append."""
        self.path = path
        self._own = path.with_suffix(f".rank{rank}{path.suffix}") if rank else path

    def of_rank(self, rank: int) -> Journal:
        """Return the same journal for another process to append to."""
        return Journal(self.path, rank)

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Write the entries and return when they are on the disk. Cost: one write and one fsync.

        Raises:
            ValueError: an entry holds NaN or infinity, which JSON lines cannot carry.
        """
        lines = "".join(json.dumps(dict(entry), allow_nan=False) + "\n" for entry in entries)
        file = os.open(self._own, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            # A torn line of a killed run is closed off first, or the new line would be glued to it.
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            _write_all(file, (("\n" if torn else "") + lines).encode())
            os.fsync(file)
        finally:
            os.close(file)

    def entries(self) -> list[dict[str, Any]]:
        """Return every whole entry of all files, of each in the order of writing; torn lines are left out."""
        whole = []
        for line in b"\n".join(path.read_bytes() for path in self._files()).split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                # The closing brace is the last byte of a record, so a torn line is never valid JSON.
                continue
            if isinstance(record, dict):
                whole.append(record)
        return whole

    def clear(self) -> None:
        """Forget all entries of all processes."""
        for path in self._files():
            path.unlink()

    def _files(self) -> list[Path]:
        others = sorted(self.path.parent.glob(f"{self.path.stem}.rank*{self.path.suffix}"))
        return [path for path in (self.path, *others) if path.exists()]

    def __len__(self) -> int:
        """Return the number of whole entries."""
        return len(self.entries())


@dataclass(frozen=True)
class RunDir:
    """The directory of one run key."""

    path: Path

    @property
    def journal(self) -> Journal:
        """The journal of finished samples."""
        return Journal(self.path / "journal.jsonl")

    def describe(self, spec: Mapping[str, Any]) -> None:
        """Write what the key was computed from, for readers of the store."""
        _replace(self.path / "spec.json", dict(spec))

    def commit(self, row: Mapping[str, Any]) -> None:
        """Make the run finished: the row appears whole or not at all."""
        _replace(self.path / "row.json", dict(row))

    def row(self) -> dict[str, Any] | None:
        """Return the committed row, or None while the run is not finished.

        Raises:
            UserError: the row was written by a newer version of the layout, or is damaged.
        """
        path = self.path / "row.json"
        try:
            row = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(
                f"store: {path} is damaged ({error}); remove it or use force=true"
            ) from error
        if row.get("schema", 0) > SCHEMA:
            raise UserError(
                f"store: {path} has schema {row['schema']}; this version reads up to {SCHEMA}"
            )
        return dict(row)


@dataclass(frozen=True)
class Store:
    """All runs under one directory."""

    root: Path

    def run(self, key: str) -> RunDir:
        """Return the directory of `key`, created if needed.

        Raises:
            UserError: the directory cannot be created.
        """
        path = self.root / "runs" / key
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.root, error) from error
        return RunDir(path)

    def check_writable(self) -> None:
        """Raise UserError unless a file can be created and removed below the root."""
        runs = self.root / "runs"
        probe = runs / f".probe-{uuid4().hex}"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return all committed rows, ordered by run key."""
        found = (RunDir(path.parent).row() for path in sorted(self.root.glob("runs/*/row.json")))
        return [row for row in found if row is not None]

    def load(self) -> pd.DataFrame:
        """Return one line for each finished run; nested keys are joined by dots.

        Columns are those of the last line of run.py: `run_key`, `model`, `method`, `variant`, `benchmark`, `ratio`,
        `budget_rule`, `seed`, `n_samples`, `metrics.<name>.value`, `metrics.<name>.stderr`, `tokens.*`, `flops.*`,
        `time.*`, `memory.*`, `settings.*` (what else changed the numbers) and `extra.*` (the headline metric is
        `extra.headline`, the environment `extra.environment.*`). Lists stay lists. A column that a row lacks is NaN
        there.
        """
        import pandas as pd

        return pd.DataFrame([_flat(row) for row in self.rows()])


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    line: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            line |= _flat(value, f"{prefix}{key}.")
        else:
            line[f"{prefix}{key}"] = value
    return line


def _unwritable(root: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(
        f"store={str(root)!r} cannot be written: {reason}; valid: a writable directory"
    )


def _write_all(file: int, data: bytes) -> None:
    # One call appends atomically; the loop only finishes what a nearly full disk cut short.
    while data:
        data = data[os.write(file, data) :]


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON beside `path`, flush it, rename it into place and flush the directory."""
    temporary = path.with_name(f".{path.name}-{uuid4().hex}")
    text = json.dumps(content, indent=1, allow_nan=False, default=_plain)
    try:
        with temporary.open("x") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise TypeError(f"{type(value).__name__} does not fit into JSON")
