"""Leases: files that name the process that computes a run, for machines that share its folder.

The first line of `<run>/lease` names the owner; after it the owner appends one byte per heartbeat, so the file's size
counts heartbeats. A watcher takes an owner for dead if the file has not grown for `expiry` seconds of the watcher's own
clock: clocks of two machines are never compared. To replace a dead owner, a process first creates `lease.<owner id>`,
which only one watcher can, and then renames it over the lease, so that at no moment two owners or none exist. Such a
successor file is itself a lease, so a successor that died on the way is replaced in the same manner. Nothing depends on
locks of the file system.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from espalier.harness.errors import UserError, tell_once
from espalier.harness.settings import Positive
from espalier.harness.store.files import durable

#: An owner is dead without watching if its last heartbeat is this many times `expiry` older than a new file, by the
#: file system's own times: clocks of one site never differ by that much.
STALE_FACTOR = 10

#: Minimum number of missing heartbeats before an owner counts as dead.
MIN_BEATS = 3


@dataclass(frozen=True)
class Terms:
    """How often an owner writes a heartbeat, and after how much silence it counts as dead, both in seconds."""

    beat: Positive = 10.0
    expiry: Positive = 60.0

    def __post_init__(self) -> None:
        """Raise UserError unless several heartbeats fit into `expiry`."""
        if not 0 < self.beat < float("inf"):
            raise UserError(f"lease.beat={self.beat:g} must be above 0, in seconds")
        if not MIN_BEATS * self.beat <= self.expiry < float("inf"):
            raise UserError(
                f"lease.expiry={self.expiry:g} must be at least {MIN_BEATS} times lease.beat={self.beat:g}; "
                f"valid: {MIN_BEATS * self.beat:g} and more"
            )


#: Name of the lease file in the folder of a run.
LEASE = "lease"

#: Bytes read of a lease: enough for its first line.
HEAD_BYTES = 1 << 16

#: The default of the config.
DEFAULT_TERMS = Terms()


@dataclass(frozen=True)
class LeaseState:
    """The content of a lease file at one moment.

    Attributes:
        inode: inode of the file.
        size: grows by one with each heartbeat.
        beat_time: time of the last heartbeat, by the file system's clock.
        owner: its first line; empty if that is torn or damaged.
    """

    inode: int
    size: int
    beat_time: float
    owner: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Unique id of the lease; the inode if the first line is torn."""
        lease_id = self.owner.get("id")
        return lease_id if isinstance(lease_id, str) and lease_id.isalnum() else str(self.inode)

    def expiry(self, default: float) -> float:
        """Return after how many seconds of silence the owner counts as dead, by its own terms."""
        seconds = self.owner.get("expiry")
        return (
            float(seconds)
            if isinstance(seconds, int | float) and 0 < seconds < math.inf
            else default
        )


def read_lease(path: Path) -> LeaseState | None:
    """Return the content of a lease file, or None if it does not exist.

    Raises:
        UserError: the path is not a file, or cannot be read.
    """
    try:
        # Opened each time: network file systems contact the server on open, but not for the attributes of a path.
        # Non-blocking: reading a pipe would never end. A link that leads nowhere is no missing file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _lease_error(path, error.strerror or str(error)) from error
    try:
        stat_result = os.fstat(descriptor)
        head = os.read(descriptor, HEAD_BYTES) if stat.S_ISREG(stat_result.st_mode) else b""
    except OSError as error:
        raise _lease_error(path, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(stat_result.st_mode):
        raise _lease_error(path, "it is not a file")
    owner: Any = None
    with suppress(ValueError, RecursionError):
        owner = json.loads(head.partition(b"\n")[0])
    return LeaseState(
        stat_result.st_ino,
        stat_result.st_size,
        stat_result.st_mtime,
        owner if isinstance(owner, dict) else {},
    )


def _lease_error(path: Path, reason: str) -> UserError:
    return UserError(
        f"store: {path} cannot be read as a lease ({reason}); valid: removing it, or the right to read it"
    )


def file_time(folder: Path) -> float:
    """Return the current time by the clock of the folder's file system. Cost: one file without a name."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


@dataclass
class Lease:
    """The right to compute one run, held until `release`; a thread writes a heartbeat every `beat` seconds.

    Args:
        path: the lease file, open in `file`.
        file: its descriptor.
        terms: how often to write a heartbeat.
    """

    path: Path
    file: int
    terms: Terms

    def __post_init__(self) -> None:
        """Start the heartbeat."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lease")
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether the lease file is still this one: a process that slept too long or was cut off may have lost it."""
        try:
            return self.path.stat().st_ino == os.fstat(self.file).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the run for other processes."""
        self._stopped.set()
        self._thread.join()
        still_owner = self.is_held
        # A network file system keeps a removed file under another name while it is open.
        os.close(self.file)
        if still_owner:
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stopped.wait(self.terms.beat):
            try:
                if not self.is_held:
                    tell_once(
                        f"run {self.path.parent} was taken over by another command; "
                        "both continue, and either row is complete"
                    )
                    return
                os.write(self.file, b".")
                os.fsync(self.file)
            except OSError as error:
                # If the disk stays away, the run itself stops at its next answer.
                tell_once(f"lease of run {self.path.parent}: {error.strerror or error}")


def create(path: Path, terms: Terms, extra: Mapping[str, Any]) -> int:
    """Create a lease file and return its descriptor.

    Args:
        path: the lease file.
        terms: of the new owner; they are stored in the file for watchers.
        extra: further entries of its first line.

    Raises:
        FileExistsError: the file exists.
        OSError: the disk does not take it.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, durable.MODE)
    try:
        owner = {
            "id": uuid4().hex,
            **durable.this_process(),
            "beat": terms.beat,
            "expiry": terms.expiry,
        }
        os.write(file, f"{json.dumps(owner | dict(extra))}\n".encode())
        os.fsync(file)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def successor(path: Path, state: LeaseState) -> Path:
    """Return the file that a process must create before it may replace an owner."""
    return path.with_name(f"{LEASE}.{state.id}")


def stale_successors(path: Path) -> list[Path]:
    """Return successor files left by processes that came too late to replace an owner and then died.

    Args:
        path: a lease that is held; the successor file of its current owner is not included.
    """
    state = read_lease(path)
    expected = None if state is None else successor(path, state)
    return [file for file in sorted(path.parent.glob(f"{LEASE}.*")) if file != expected]


class OwnerWatch:
    """Decides whether the owner of a lease lives, by reading it repeatedly."""

    def __init__(self, path: Path, terms: Terms) -> None:
        self._path, self._terms = path, terms
        self._last: LeaseState | None = None
        self._since = 0.0

    def dead(self, state: LeaseState) -> bool:
        """Return whether the owner has been silent for long enough. Cost: one file on the first call."""
        expiry, now = state.expiry(self._terms.expiry), time.monotonic()
        if state != self._last:
            self._last, self._since = state, now
            return file_time(self._path.parent) - state.beat_time > STALE_FACTOR * expiry
        return now - self._since > expiry

    @property
    def silent(self) -> bool:
        """Whether the owner may be dead: at least two heartbeats are missing."""
        return time.monotonic() - self._since > 2 * self._terms.beat


def take(
    path: Path, terms: Terms, patience: float, sole_process: bool, extra: Mapping[str, Any]
) -> tuple[Lease | None, bool]:
    """Return the lease of a run, or None if another owner lives; and whether it was taken over from another machine.

    Args:
        path: the lease file.
        terms: of the new owner.
        patience: seconds to wait for an owner that lives; a silent one is watched until it is known to be alive or
            dead.
        sole_process: whether no other process of this machine can hold the run, so that a former owner here is dead.
        extra: further entries of the lease.

    Raises:
        OSError: the disk does not take the file.
    """
    file, foreign = _acquire(path, terms, patience, sole_process, extra)
    return (None if file is None else Lease(path, file, terms)), foreign


def _acquire(
    path: Path, terms: Terms, patience: float, sole_process: bool, extra: Mapping[str, Any]
) -> tuple[int | None, bool]:
    """Return the result of `take`, with a descriptor in place of the lease."""
    watch, start = OwnerWatch(path, terms), time.monotonic()
    while True:
        try:
            return create(path, terms, extra), False
        except FileExistsError:
            state = read_lease(path)
        if state is None:
            continue
        owner_died_here = sole_process and state.owner.get("kernel") == durable.kernel()
        if owner_died_here or watch.dead(state):
            successor_path = successor(path, state)
            file, _ = _acquire(successor_path, terms, patience, sole_process, extra)
            if file is None:
                return None, False
            if _replace_owner(successor_path, path, state):
                return file, not owner_died_here
            os.close(file)
            successor_path.unlink(missing_ok=True)
            continue
        waited = time.monotonic() - start
        # With any patience at all, wait until the owner is known to be alive or dead.
        if patience == 0 or (waited >= max(patience, MIN_BEATS * terms.beat) and not watch.silent):
            return None, False
        time.sleep(min(terms.beat, 1.0) / 4)


def _replace_owner(successor_path: Path, path: Path, state: LeaseState) -> bool:
    """Rename a successor file over the lease that it replaces; return whether that succeeded.

    It fails if the owner wrote another heartbeat, or if a new owner is already in its place: then this file was made
    after the rename. While this file exists, no other process can replace the same owner.
    """
    if read_lease(path) != state:
        return False
    try:
        os.replace(successor_path, path)
    except FileNotFoundError:  # a new owner has removed it
        return False
    return True
