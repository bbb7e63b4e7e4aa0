"""The run store: `<root>/runs/<key>/{spec.json, journal*.jsonl, row.json}`, safe against crashes and second writers.

The journal takes one line per finished sample, written with a single append and flushed to the disk, so a killed run
loses at most a torn last line. A run is finished if and only if `row.json` exists; it appears by rename. A run that is
repeated (`force=true`) keeps a separate journal, `forced*.jsonl`, until it is finished. `lock` and `lease` are held
while a process computes the run (harness/store/claims.py). `failed.json` holds the error of a run without a row,
`<root>/sweeps` the cells of each command, `<root>/cells` the runs of single cells (harness/runs/stored_cells.py). A row
is checked by its own folder alone: no other file can spoil it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, StoreLost, UserError, first_words, tell_once
from espalier.harness.store.answer_digest import matches_row
from espalier.harness.store.claims import WITHOUT_LOCKS, claim
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import read_json
from espalier.harness.store.files.folder_checks import below
from espalier.harness.store.files.journal import Journal
from espalier.harness.store.files.lease import DEFAULT_TERMS, Terms
from espalier.harness.store.row_shape import BLOCKS, SHAPE, check_complete, read_row
from espalier.harness.store.schema import SCHEMA, Newer

__all__ = ["BLOCKS", "RUN_KEY", "SCHEMA", "SHAPE", "WITHOUT_LOCKS", "RunDir", "Store", "Unreadable"]

#: Form of a run key, the name of a run's folder.
RUN_KEY = re.compile(r"[0-9a-f]{16}")

#: The reason why a run has no row; the file is removed when it succeeds.
FAILED = "failed.json"

#: Bytes that a store must have room for, about one row.
PROBE = 16_384


class Unreadable(UserError):
    """A file `row.json` holds no row that this version accepts for the run of its folder."""


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
        """The journal of a repeated run, while `row.json` and `journal` still exist."""
        return Journal(self.path / "forced.jsonl")

    def describe(self, spec: Mapping[str, Any]) -> None:
        """Write the data that the key is the hash of, for readers of the store."""
        _write(self.path / "spec.json", spec)

    def commit(self, row: Mapping[str, Any], forced: bool = False) -> None:
        """Finish the run: the row appears in full or not at all.

        With `forced`, the forced journal replaces the other one. A process killed in between leaves the old row or the
        new one, and a journal that has all samples.

        Raises:
            StoreLost: the disk is full or cannot be written.
        """
        if forced and not self._replaced(row):
            self.journal.replace_by(self.forced)
        _write(self.path / "row.json", row)
        (self.path / FAILED).unlink(missing_ok=True)
        if forced:
            self.forced.clear()

    @contextmanager
    def failure_recorded(self, argv: Sequence[str], quiet: bool = False) -> Iterator[None]:
        """Write an exception of the block to the run's folder, and raise it again; an interruption is not a failure.

        Args:
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
                    content = f"{json.dumps(failure, indent=1)}\n".encode()
                    durable.replace(self.path / FAILED, content)
            raise

    def failure(self) -> dict[str, Any] | None:
        """Return the run's failure: `cause`, `error`, `when`, host; None if there is none or it cannot be read."""
        try:
            failure = read_json(self.path / FAILED)
        except FOREIGN:
            return None
        is_failure = isinstance(failure, dict) and isinstance(failure.get("cause"), str)
        return failure if is_failure else None

    def _replaced(self, row: Mapping[str, Any]) -> bool:
        """Return whether another command has already committed the forced journal, and this one is newer."""
        matches = matches_row(row, self.forced.entries())
        return matches is False and matches_row(row, self.journal.entries()) is True

    @property
    def finished(self) -> bool:
        """Whether a row exists; it may still turn out to be damaged."""
        return os.path.exists(self.path / "row.json")

    @property
    def committed(self) -> float:
        """When the row was committed, in seconds; orders rows by age."""
        return (self.path / "row.json").stat().st_mtime

    def row(self, complete: bool = False) -> dict[str, Any] | None:
        """Return the committed row, or None while the run is not finished.

        Args:
            complete: whether all numbers that are shown of a row must be present.

        Raises:
            Unreadable: the file is damaged, of a newer version of the layout, or the row of another run.
        """
        path = self.path / "row.json"
        try:
            problem, row = None, read_row(path)
            if complete:
                check_complete(row)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Newer as error:
            raise Unreadable(
                f"store: {path} is of {error}; valid: the version that wrote it, force=true, which replaces it, "
                "or another store"
            ) from error
        except PermissionError as error:
            raise access_error(self.path, error) from error
        except FOREIGN as error:
            problem, row = f"is damaged ({first_words(error)})", {}
        if problem is None and row["run_key"] != self.path.name:
            problem = f"is the row of run {row['run_key']!r}"
        if problem is not None:
            raise Unreadable(
                f"store: {path} {problem}; valid: force=true, which replaces it, or removing it"
            )
        return row

    def check_writable(self) -> None:
        """Raise UserError if links, or files of another user, keep this one from computing or resuming the run.

        An existing row can be read all the same.
        """
        for path in (self.path, *self.path.glob("*.jsonl")):
            below(self.path.parents[1], *path.relative_to(self.path.parents[1]).parts)
            needed = os.W_OK | os.X_OK if path == self.path else os.W_OK
            if path.exists() and not os.access(path, needed):
                raise UserError(
                    f"store={str(self.path.parent.parent)!r}: run {self.path.name} belongs to user "
                    f"{path.stat().st_uid}, and this user may not write {path.relative_to(self.path.parent)}: "
                    "it cannot be computed or resumed; valid: a store of your own, or one that a group writes "
                    "(umask 002, docs/scale.md)"
                )

    def claim(self, patience: float, terms: Terms = DEFAULT_TERMS) -> AbstractContextManager[bool]:
        """Claim the run for this process, so that no other process computes it (`store/claims.py`).

        Raises:
            StoreLost: the disk does not take the files of lock and lease.
        """
        return claim(self.path, patience, terms, (self.journal, self.forced))


@dataclass(frozen=True)
class Store:
    """All runs under one directory."""

    root: Path

    def run(self, key: str) -> RunDir:
        """Return the directory of `key`, created if needed.

        Raises:
            UserError: the directory cannot be created.
        """
        path = below(self.root, "runs", key)
        try:
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                durable.sync_folder(path.parent)
        except OSError as error:
            raise _unwritable(self.root, error) from error
        return RunDir(path)

    def check_writable(self) -> None:
        """Raise UserError unless a file can be written and removed below the root."""
        runs = below(self.root, "runs")
        try:
            runs.mkdir(parents=True, exist_ok=True)
            # It has no name, so nothing remains if the process dies here.
            with tempfile.TemporaryFile(dir=runs) as probe:
                probe.write(bytes(PROBE))
                probe.flush()
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def finished(self) -> Iterator[tuple[RunDir, dict[str, Any]]]:
        """Yield all committed rows with their folders, ordered by run key.

        A row that cannot be read, is of a newer version or was copied from another folder does not affect the others:
        it is reported on stderr with the reason, and passed over.
        """
        for directory in self.folders():
            try:
                row = directory.row()
            except Unreadable as error:
                tell_once(f"passed over: {error}")
                continue
            if row is not None:
                yield directory, row

    def folders(self) -> list[RunDir]:
        """Return the folders that have a row, readable or not, ordered by run key."""
        runs = []
        for name in folders_in(self.root / "runs"):
            run = RunDir(self.root / "runs" / name)
            try:
                os.stat(run.path / "row.json")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                tell_once(f"passed over: {access_error(run.path, error)}")
                continue
            runs.append(run)
        return runs

    def rows(self) -> list[dict[str, Any]]:
        """Return all committed rows, ordered by run key; see `finished`."""
        return [row for _, row in self.finished()]


def folders_in(runs: Path) -> list[str]:
    """Return the sorted names of a store's runs; empty if it has none.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        with os.scandir(runs) as entries:
            # The first check needs no call of the system; the second follows links, also broken ones.
            return sorted(
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(
            f"store={str(runs.parent)!r} cannot be read: {first_words(error)}; valid: a store that you may read"
        ) from error


def access_error(folder: Path, error: OSError) -> Unreadable:
    """Return the error for a run folder that the system does not let this process read."""
    remedy = "removing it"
    if isinstance(error, PermissionError):
        remedy = f"a store of your own, or its owner's `chmod -R a+rX {folder}`"
    return Unreadable(
        f"store: {folder / 'row.json'} cannot be read ({first_words(error)}); valid: {remedy}"
    )


def _unwritable(root: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(
        f"store={str(root)!r} cannot be written: {reason}; valid: a writable directory"
    )


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(dict(content), indent=1, allow_nan=False, default=_plain)
    durable.replace(path, f"{text}\n".encode())


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise TypeError(f"{type(value).__name__} does not fit into JSON")
