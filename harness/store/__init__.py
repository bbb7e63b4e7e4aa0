"""The run store: `<root>/runs/<key>/{spec.json, journal*.jsonl, row.json}`, safe against crashes and second writers.

The journal takes one line for each finished sample, written with a single append and flushed to the disk, so a killed
run loses at most a torn last line. `row.json` is the only sign that a run is finished; it appears by rename. A run that
is made again (`force=true`) keeps a journal of its own, `forced*.jsonl`, until it is finished. `lock` is held while a
process computes the run. A row is judged by its own folder alone: no other file of the store can spoil it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

from harness import durable
from harness.errors import StoreLost, UserError, tell_once
from harness.journal import Journal

#: Version of the layout of `row.json`; a reader refuses a newer one.
SCHEMA = 1

#: What a file system says that has no locks, or that takes no file for one.
WITHOUT_LOCKS = frozenset(
    (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EROFS, errno.EACCES)
)

#: Bytes that a store must have room for: those of a row.
PROBE = 16_384

#: What every row has, and what its blocks are; a file that differs is no row.
SHAPE: Mapping[str, type | tuple[type, ...]] = {
    "run_key": str,
    "model": str,
    "method": str,
    "benchmark": str,
    "ratio": (int, float),
    "n_samples": int,
    "extra": dict,
}
BLOCKS = ("metrics", "tokens", "flops", "time", "memory")
#: What is shown of a row that is served again: numbers, or null, of these names.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "tokens": ("visual", "requested_keep", "kept_final", "layer_average"),
    "flops": ("prefill_exact", "share_of_full"),
    "time": ("vision_ms", "select_ms", "prefill_ms", "decode_ms_per_token"),
    "memory": ("kv_bytes", "peak_bytes"),
}


class Unreadable(UserError):
    """A file `row.json` holds no row that this version can take for the run of its folder."""


@dataclass(frozen=True)
class RunDir:
    """The directory of one run key."""

    path: Path

    @property
    def journal(self) -> Journal:
        """The journal of finished samples."""
        return Journal(self.path / "journal.jsonl")

    @property
    def forced(self) -> Journal:
        """The journal of a run that is made again while `row.json` and `journal` still stand."""
        return Journal(self.path / "forced.jsonl")

    def describe(self, spec: Mapping[str, Any]) -> None:
        """Write what the key was computed from, for readers of the store."""
        _write(self.path / "spec.json", spec)

    def commit(self, row: Mapping[str, Any], forced: bool = False) -> None:
        """Make the run finished: the row appears whole or not at all.

        With `forced`, the forced journal replaces the other one. A process killed in between leaves the old row or the
        new one, and a journal that has all samples.

        Raises:
            StoreLost: the disk is full or cannot be written.
        """
        if forced:
            self.journal.take_over(self.forced)
        _write(self.path / "row.json", row)
        if forced:
            self.forced.clear()

    @property
    def finished(self) -> bool:
        """Whether a row is there; it may yet turn out to be damaged."""
        return (self.path / "row.json").exists()

    @property
    def committed(self) -> float:
        """When the row was committed, in seconds; orders rows by age."""
        return (self.path / "row.json").stat().st_mtime

    def row(self, whole: bool = False) -> dict[str, Any] | None:
        """Return the committed row, or None while the run is not finished.

        Args:
            whole: whether it is to be shown, so that everything shown must be there.

        Raises:
            Unreadable: the file is damaged, of a newer version of the layout, or the row of another run.
        """
        path = self.path / "row.json"
        if not path.exists():
            return None
        try:
            problem, row = None, _row(path)
            if whole:
                _check_whole(row)
        except (OSError, ValueError, RecursionError) as error:
            problem, row = f"is damaged ({error})", {}
        if problem is None and row["run_key"] != self.path.name:
            problem = f"is the row of run {row['run_key']!r}"
        if problem is not None:
            raise Unreadable(
                f"store: {path} {problem}; valid: force=true, which replaces it, or removing it"
            )
        return row

    @contextmanager
    def claim(self, patience: float) -> Iterator[bool]:
        """Hold the run for this process, so that no other one computes it at the same time.

        Yields whether it is held; another process may hold it for longer than `patience` seconds. The lock ends with
        its process, however that ends. It holds among the processes of one machine; several machines that share a file
        system need a lease.

        Raises:
            StoreLost: the disk does not take the file of the lock.
        """
        lock = FileLock(self.path / "lock", timeout=patience, poll_interval=0.2)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise StoreLost(f"run {self.path} cannot be held: {error.strerror}") from error
            # Two commands may then compute the same run, and either's row is whole.
            yield True
            return
        try:
            yield True
        finally:
            lock.release()


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
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                durable.sync_folder(path.parent)
        except OSError as error:
            raise _unwritable(self.root, error) from error
        return RunDir(path)

    def check_writable(self) -> None:
        """Raise UserError unless a file can be written and removed below the root."""
        runs = self.root / "runs"
        probe = runs / f".probe-{uuid4().hex}"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(bytes(PROBE))
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def finished(self) -> list[tuple[RunDir, dict[str, Any]]]:
        """Return all committed rows with their folders, ordered by run key.

        One that cannot be read, is of a newer version or was copied from another folder says nothing about the others:
        it is named on stderr with the reason, and passed over.
        """
        return list(self.each())

    def each(self) -> Iterator[tuple[RunDir, dict[str, Any]]]:
        """Yield what `finished` returns, one row at a time, for stores whose rows do not fit into memory together."""
        for path in sorted(self.root.glob("runs/*/row.json")):
            directory = RunDir(path.parent)
            try:
                row = directory.row()
            except Unreadable as error:
                tell_once(f"passed over: {error}")
                continue
            if row is not None:
                yield directory, row

    def rows(self) -> list[dict[str, Any]]:
        """Return all committed rows, ordered by run key; see `finished`."""
        return [row for _, row in self.finished()]


def _unwritable(root: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(
        f"store={str(root)!r} cannot be written: {reason}; valid: a writable directory"
    )


def _row(path: Path) -> dict[str, Any]:
    """Return what a file holds if it has the shape of a row; raises ValueError with the reason if it has not."""
    # A pipe would never end.
    if not path.is_file():
        raise ValueError("not a file")
    row = json.loads(path.read_bytes())
    if not isinstance(row, dict):
        raise ValueError("not a table")
    schema = row.get("schema")
    if not isinstance(schema, int):
        raise ValueError("no schema")
    if schema > SCHEMA:
        raise ValueError(f"schema {schema}; this version reads up to {SCHEMA}")
    for name, kind in {**dict.fromkeys(set(BLOCKS) & set(row), dict), **SHAPE}.items():
        if not isinstance(row.get(name), kind):
            raise ValueError(f"{name} is {row.get(name)!r}")
    return row


def _check_whole(row: Mapping[str, Any]) -> None:
    """Raise ValueError unless every number that is shown of a row is there."""
    metrics = row.get("metrics")
    if not metrics:
        raise ValueError(f"metrics is {metrics!r}")
    tables: dict[str, tuple[Any, tuple[str, ...]]] = {
        f"metrics.{name}": (values, ("value", "stderr")) for name, values in metrics.items()
    }
    tables |= {block: (row.get(block), names) for block, names in SHOWN.items()}
    for place, (values, names) in tables.items():
        if not isinstance(values, Mapping):
            raise ValueError(f"{place} is {values!r}")
        for name in names:
            if not isinstance(values.get(name, ""), int | float | None):
                raise ValueError(f"{place}.{name} is {values.get(name)!r}")
    if not isinstance(row["extra"].get("failures"), list):
        raise ValueError(f"extra.failures is {row['extra'].get('failures')!r}")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(dict(content), indent=1, allow_nan=False, default=_plain)
    durable.replace(path, f"{text}\n".encode())


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise TypeError(f"{type(value).__name__} does not fit into JSON")
