"""Stored verdicts: `<store>/judge/<2 digits>/<key>.json`, written atomically; the first verdict of a key counts.

The key is a hash of the question, the model and its settings, not of the server's address: a resumed run, or another
process, does not repeat a question.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from espalier.harness.errors import FOREIGN, StoreLost, tell_once
from espalier.harness.store import WITHOUT_LOCKS
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import digest, read_json
from espalier.harness.store.files.folder_checks import below

#: Increased when the meaning of the key changes.
VERSION = 1


@dataclass(frozen=True)
class StoredVerdict:
    """A judge's verdict.

    Attributes:
        text: the judge's text.
        served: the server's name of the model; None: not given.
        tries: number of requests.
    """

    text: str
    served: str | None = None
    tries: int = 1


def key_of(request: Mapping[str, Any], prompt: str) -> str:
    """Return the key of a verdict: a hash of the request, with model and settings, and of the prompt's name."""
    return digest({"version": VERSION, "prompt": prompt, "request": request})


@dataclass(frozen=True)
class VerdictStore:
    """The verdicts of one store, which several processes may use at once."""

    root: Path

    def __post_init__(self) -> None:
        """Raise UserError if the folder is a link."""
        below(self.root.parent, self.root.name)

    def get(self, key: str) -> StoredVerdict | None:
        """Return a verdict; None if there is none or it is damaged, which is reported."""
        path = self._path(key)
        try:
            entry = read_json(path)
            verdict = StoredVerdict(**entry["verdict"])
            if entry["key"] != key or not isinstance(verdict.text, str):
                raise ValueError("of another question")
        except FileNotFoundError:
            return None
        except FOREIGN as error:
            tell_once(f"judge: {path} is damaged and does not count: {error}")
            return None
        return verdict

    def put(
        self,
        key: str,
        request: Mapping[str, Any],
        verdict: StoredVerdict,
        holds: Callable[[str], bool] = bool,
    ) -> StoredVerdict:
        """Store a verdict and return the one that counts: another process may have been first.

        `holds` returns whether a stored verdict can be scored; if not, the new one replaces it.

        Raises:
            StoreLost: the disk is full or cannot be written.

        Cost: two flushes.
        """
        path = self._path(key)
        with self._locked(path.parent):
            stored = self.get(key)
            if stored is not None and holds(stored.text):
                return stored
            entry = {"key": key, "verdict": asdict(verdict), "request": dict(request)}
            durable.replace(path, json.dumps(entry, indent=1).encode())
        return verdict

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.json"

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Lock verdicts for writing; on a file system without locks the last write wins."""
        lock = FileLock(self.root / "lock")
        try:
            below(self.root, folder.name).mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS or not folder.is_dir():
                raise StoreLost(
                    f"store: {folder} cannot be written: {error.strerror or error}; answers and verdicts so far are "
                    "kept, the same command goes on from them"
                ) from error
        try:
            yield
        finally:
            lock.release()
