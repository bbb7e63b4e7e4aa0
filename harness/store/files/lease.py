"""Who computes a run, for machines that share its folder: a file that its owner makes longer while it lives.

The first line of `<run>/lease` says who owns the run; behind it stands one letter for each heartbeat, so that the size
of the file counts them. A watcher calls an owner dead whose file has not grown for `expiry` seconds of the watcher's
own clock: clocks of two machines are never compared. Whoever follows a dead owner first creates `lease.<its id>`, which
only one of several watchers can, and then renames that over the lease: no moment has two owners or none. Such a
successor is a lease itself, so one that died on the way is followed as any other. Nothing rests on locks of the file
system.
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
from espalier.harness.store.files import durable, hosts

#: An owner whose last heartbeat is this many times `expiry` older than a file made just now, by the file system's own
#: times, need not be watched: no clocks of one site differ by that.
LONG = 10

#: How many heartbeats at least must fail before an owner counts as dead.
BEATS = 3


@dataclass(frozen=True)
class Terms:
    """How often an owner says that it lives, and after how much silence it counts as dead, both in seconds."""

    beat: Positive = 10.0
    expiry: Positive = 60.0

    def __post_init__(self) -> None:
        """Raise UserError unless an owner has several beats before it counts as dead."""
        if not 0 < self.beat < float("inf"):
            raise UserError(f"lease.beat={self.beat:g} must be above 0, in seconds")
        if not BEATS * self.beat <= self.expiry < float("inf"):
            raise UserError(
                f"lease.expiry={self.expiry:g} must be at least {BEATS} times lease.beat={self.beat:g}; "
                f"valid: {BEATS * self.beat:g} and more"
            )


#: The file of a run that says who computes it.
LEASE = "lease"

#: Bytes of a lease that are read: its first line, and heartbeats.
LINE = 1 << 16

#: Unless a config says otherwise.
USUAL = Terms()


@dataclass(frozen=True)
class Seen:
    """What a lease file says at one moment.

    Attributes:
        number: of the file itself (inode).
        size: grows by one with each heartbeat.
        beaten: when it grew last, by the file system's clock.
        owner: its first line; empty where that is torn or damaged.
    """

    number: int
    size: int
    beaten: float
    owner: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """What no other lease has; a torn one says nothing, and has the number of its file."""
        told = self.owner.get("id")
        return told if isinstance(told, str) and told.isalnum() else str(self.number)

    def expiry(self, otherwise: float) -> float:
        """Return after how many seconds of silence the owner wants to be called dead."""
        told = self.owner.get("expiry")
        return float(told) if isinstance(told, int | float) and 0 < told < math.inf else otherwise


def look(path: Path) -> Seen | None:
    """Return what a lease file says; None where there is none.

    Raises:
        UserError: what stands there is no file, or cannot be looked at.
    """
    try:
        # Opened for each look: network file systems ask the server then, and not for the attributes of a path. A pipe
        # would never end.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _unopened(path, error)
    try:
        state = os.fstat(file)
        line = os.read(file, LINE) if stat.S_ISREG(state.st_mode) else b""
    except OSError as error:
        raise _no_lease(path, error.strerror or str(error)) from error
    finally:
        os.close(file)
    if not stat.S_ISREG(state.st_mode):
        raise _no_lease(path, "it is no file")
    owner: Any = None
    with suppress(ValueError, RecursionError):
        owner = json.loads(line.partition(b"\n")[0])
    return Seen(
        state.st_ino, state.st_size, state.st_mtime, owner if isinstance(owner, dict) else {}
    )


def _unopened(path: Path, error: OSError) -> Seen | None:
    """Return what a file has that another user keeps to himself: it grows as any other."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        state = None
    if state is None or not stat.S_ISREG(state.st_mode):
        raise _no_lease(path, error.strerror or str(error)) from error
    return Seen(state.st_ino, state.st_size, state.st_mtime)


def _no_lease(path: Path, reason: str) -> UserError:
    return UserError(
        f"store: {path} cannot be read as a lease ({reason}); valid: removing it, or the right to read it"
    )


def file_time(folder: Path) -> float:
    """Return the time by the clock that gives the files of a folder theirs. Cost: one file without a name."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


@dataclass
class Lease:
    """The right to compute one run, held until `release`; a thread of its own says every `beat` seconds that it is.

    Args:
        path: the lease file, open in `file`.
        file: its descriptor.
        terms: how often to beat.
    """

    path: Path
    file: int
    terms: Terms

    def __post_init__(self) -> None:
        """Begin to beat."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True, name="lease")
        self._thread.start()

    @property
    def held(self) -> bool:
        """Whether the file is still this one: whoever slept too long, or was cut off, may have lost it."""
        try:
            return self.path.stat().st_ino == os.fstat(self.file).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let others have the run."""
        self._over.set()
        self._thread.join()
        held = self.held
        # A network file system keeps a removed file under another name while it is open.
        os.close(self.file)
        if held:
            self.path.unlink(missing_ok=True)

    def _live(self) -> None:
        while not self._over.wait(self.terms.beat):
            try:
                if not self.held:
                    tell_once(
                        f"run {self.path.parent} was taken over by another command; both go on, either's row is whole"
                    )
                    return
                os.write(self.file, b".")
                os.fsync(self.file)
            except OSError as error:
                # The run itself stops with its next answer if the disk is gone for good.
                tell_once(f"lease of run {self.path.parent}: {error.strerror or error}")


def create(path: Path, terms: Terms, more: Mapping[str, Any]) -> int:
    """Make a lease file and return its descriptor.

    Args:
        path: the lease file.
        terms: of the new owner; they stand in the file, for whoever watches it.
        more: what else its first line says.

    Raises:
        FileExistsError: there is one.
        OSError: the disk does not take it.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, durable.MODE)
    try:
        owner = {"id": uuid4().hex, **hosts.describe(), "beat": terms.beat, "expiry": terms.expiry}
        os.write(file, f"{json.dumps(owner | dict(more))}\n".encode())
        os.fsync(file)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def successor(path: Path, seen: Seen) -> Path:
    """Return the file that whoever follows an owner must create first."""
    return path.with_name(f"{LEASE}.{seen.id}")


def stale_successors(path: Path) -> list[Path]:
    """Return the files of those who came too late to follow somebody, and died before they took them back.

    Args:
        path: a lease that is held: whoever follows its owner is not among them.
    """
    seen = look(path)
    own = None if seen is None else successor(path, seen)
    return [one for one in sorted(path.parent.glob(f"{LEASE}.*")) if one != own]


class Watch:
    """Judges whether the owner of a lease lives, by looking at it again and again."""

    def __init__(self, path: Path, terms: Terms) -> None:
        self._path, self._terms = path, terms
        self._last: Seen | None = None
        self._since = 0.0

    def dead(self, seen: Seen) -> bool:
        """Say whether the owner has been silent for long enough. Cost: one file on the first look."""
        expiry, now = seen.expiry(self._terms.expiry), time.monotonic()
        if seen != self._last:
            self._last, self._since = seen, now
            return file_time(self._path.parent) - seen.beaten > LONG * expiry
        return now - self._since > expiry

    @property
    def silent(self) -> bool:
        """Whether the owner may be dead: two heartbeats at least did not come."""
        return time.monotonic() - self._since > 2 * self._terms.beat


def take(
    path: Path, terms: Terms, patience: float, alone: bool, more: Mapping[str, Any]
) -> tuple[Lease | None, bool]:
    """Return the lease of a run, or None if another owner lives; and whether an owner of another machine is followed.

    Args:
        path: the lease file.
        terms: of the new owner.
        patience: seconds to wait for an owner that lives; one that is silent is watched until that is decided.
        alone: whether no other process of this machine can hold the run: one that did is dead then.
        more: what else the lease says.

    Raises:
        OSError: the disk does not take the file.
    """
    file, foreign = _own(path, terms, patience, alone, more)
    return (None if file is None else Lease(path, file, terms)), foreign


def _own(
    path: Path, terms: Terms, patience: float, alone: bool, more: Mapping[str, Any]
) -> tuple[int | None, bool]:
    """Return what `take` does, with a descriptor in place of the lease."""
    watch, start = Watch(path, terms), time.monotonic()
    while True:
        try:
            return create(path, terms, more), False
        except FileExistsError:
            seen = look(path)
        if seen is None:
            continue
        died_here = alone and seen.owner.get("kernel") == hosts.kernel()
        if died_here or watch.dead(seen):
            after = successor(path, seen)
            file, _ = _own(after, terms, patience, alone, more)
            if file is None:
                return None, False
            if _follows(after, path, seen):
                return file, not died_here
            os.close(file)
            after.unlink(missing_ok=True)
            continue
        waited = time.monotonic() - start
        # Whoever waits at all waits until it is known whether the owner lives.
        if patience == 0 or (waited >= max(patience, BEATS * terms.beat) and not watch.silent):
            return None, False
        time.sleep(min(terms.beat, 1.0) / 4)


def _follows(after: Path, path: Path, seen: Seen) -> bool:
    """Put a successor in the place of the lease that it follows; say whether it could.

    It could not if the owner gave a sign of life, or another one is in its place: then this file was made after that
    one had been renamed. As long as it is there, nobody else follows the same owner.
    """
    if look(path) != seen:
        return False
    try:
        os.replace(after, path)
    except FileNotFoundError:  # a new owner has cleared it away
        return False
    return True
