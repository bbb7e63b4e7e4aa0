"""Copies of the hub's data sets in a folder of the user's (`benchmark.path`): where each lies, and what is in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.digests import Digests, digest
from harness.durable import replace
from harness.errors import FOREIGN, StoreLost, UserError
from harness.files import read_json

#: How many names an error line lists.
NAMED = 8

#: A file changed less than this ago may change again within the clock tick of its time: it is read again next time.
SETTLED = 2_000_000_000


@dataclass(frozen=True)
class Copies:
    """A folder that holds the copy of one repository, or of several as `<owner>/<name>`.

    Attributes:
        folder: `benchmark.path`.
        main: the benchmark's own data set (`benchmark.dataset.path`); None: whichever its task asks for.
    """

    folder: Path
    main: str | None = None

    @property
    def several(self) -> bool:
        """Whether the folder holds repositories by owner and name, not the files of one."""
        return not any(
            path.is_file() for depth in ("*", "*/*") for path in _visible(self.folder.glob(depth))
        )

    def check(self) -> None:
        """Raise UserError if there is no folder, or nothing of the benchmark's own data set in it."""
        if not self.folder.is_dir():
            raise UserError(
                f"benchmark.path={str(self.folder)!r} is not a folder; valid: one that holds the data set's repository"
            )
        if self.main is not None:
            self.find(self.main)

    def find(self, name: str) -> Path:
        """Return the folder of a data set's copy.

        Raises:
            UserError: there is none; or the folder is that of another data set.
        """
        own = self.folder / name
        if own.is_dir():
            return own
        if self.several or (self.main is not None and self.main != name):
            there = ", ".join(self._there()) or "nothing"
            raise UserError(
                f"benchmark.path={str(self.folder)!r} has no data set {name!r}; there is: {there}; "
                f"valid: a folder that holds the files of its repository, or these in {name}"
            )
        return self.folder

    def revision(self, digests: Digests) -> str:
        """Return a digest of the names and contents of what a run of the benchmark reads.

        Without a data set of its own that is all of the folder. Cost: one read of each file; what has kept its size and
        time of change since it was last read is remembered beside the cache of data sets.
        """
        return revision(self.digested, digests)

    @property
    def digested(self) -> Path:
        """The folder that `revision` covers; raises UserError as `find`."""
        return self.folder if self.main is None else self.find(self.main)

    def _there(self) -> list[str]:
        pattern = "*/*" if self.several else "*"
        names = sorted(
            path.relative_to(self.folder).as_posix() for path in _visible(self.folder.glob(pattern))
        )
        return [*names[:NAMED], *(["..."] if len(names) > NAMED else [])]


def cache_folder() -> Path:
    """Return where Hugging Face's `datasets` keeps what it has prepared, as that library finds it."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    named = os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets")
    return Path(os.path.expandvars(named)).expanduser()


def revision(folder: Path, digests: Digests) -> str:
    """Return a digest of the names and contents of a folder's files; hidden ones and their folders do not count."""
    memory = cache_folder() / "espalier" / f"{digest(str(folder.absolute()))[:16]}.json"
    known, found = _remembered(memory), {}
    listing = []
    for name, path in _files(folder):
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        old = known.get(name)
        content = old[2] if old is not None and old[:2] == stamp else digests.file(path)
        if time.time_ns() - stat.st_mtime_ns > SETTLED:
            found[name] = [*stamp, content]
        listing.append((name, content))
    if found != known:
        # A cache that cannot be written costs time, no more; whoever prepares data there is told.
        with suppress(OSError, StoreLost):
            memory.parent.mkdir(parents=True, exist_ok=True)
            replace(memory, json.dumps(found).encode())
    return digest(listing)


def _remembered(memory: Path) -> dict[str, list[object]]:
    try:
        found = read_json(memory)
        return {str(name): [*mark] for name, mark in found.items() if len(mark) == 3}
    except FOREIGN:
        return {}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for place, folders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(place)
        folders[:] = sorted(
            name
            for name in folders
            # A link to a folder around it would never end.
            if not name.startswith(".")
            and not Path(here).is_relative_to(os.path.realpath(Path(place, name)))
        )
        for name in sorted(names):
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _visible(paths: Iterator[Path]) -> Iterator[Path]:
    return (path for path in paths if not path.name.startswith("."))
