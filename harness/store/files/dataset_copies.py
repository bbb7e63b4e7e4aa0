"""Copies of the hub's data sets in a folder of the user's (`benchmark.path`): where each lies, and what is in it."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.errors import FOREIGN, StoreLost, UserError
from espalier.harness.store.files.digests import Digests, digest
from espalier.harness.store.files.durable import replace
from espalier.harness.store.files.untrusted_json import read_json

#: How many names an error line lists.
NAMED = 8

#: Endings of files that hold samples or their media.
DATA = frozenset(
    (
        *(".parquet", ".arrow", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".xml", ".py", ".md"),
        *(
            ".zip",
            ".tar",
            ".gz",
            ".tgz",
            ".xz",
            ".zst",
            ".7z",
            ".npy",
            ".npz",
            ".h5",
            ".mdb",
            ".db",
        ),
        *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".pdf", ".pkl", ".pt"),
        *(".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".wav", ".mp3", ".flac"),
    )
)

#: Folders below which the kernel shows itself as files.
KERNEL = tuple(map(Path, ("/proc", "/sys", "/dev")))

#: Files that a data set has at most, links included.
MOST_FILES = 5_000_000

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
        check_place("benchmark.path", self.folder)
        folder = self.folder if self.main is None else self.find(self.main)
        if not any(path.suffix.lower() in DATA for _, path in _files(folder)):
            raise UserError(
                f"benchmark.path={str(self.folder)!r} holds no file of a data set; valid: a folder with .parquet, "
                ".json, .csv or the like"
            )

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
        try:
            kept = path.stat()
            stamp = [kept.st_size, kept.st_mtime_ns]
            old = known.get(name)
            content = old[2] if old is not None and old[:2] == stamp else digests.file(path)
        except OSError as error:
            raise UserError(
                f"benchmark.path: {str(path)!r} cannot be read: {error.strerror or error}; valid: a whole copy"
            ) from error
        if time.time_ns() - kept.st_mtime_ns > SETTLED:
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


def check_place(key: str, folder: Path) -> None:
    """Raise UserError if a folder to be read whole is a disk, or shows the kernel's own state."""
    place = folder.resolve()
    if place == place.parent or any(place.is_relative_to(one) for one in KERNEL):
        shared = place.is_relative_to("/dev/shm") and place != Path("/dev/shm")
        if not shared:
            raise UserError(
                f"{key}={str(folder)!r} is a whole disk or the kernel's; valid: the folder of the files themselves"
            )


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each plain file; links in circles are followed once.

    Raises:
        UserError: a folder cannot be listed, a data file is a pipe or the like, or there is no end of them.
    """

    def stop(error: OSError) -> None:
        raise UserError(
            f"benchmark.path: {error.filename!r} cannot be listed: {error.strerror}; valid: a folder that you may read"
        ) from error

    count = 0
    above: dict[str, frozenset[tuple[int, int]]] = {}
    for place, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        entered = os.stat(place)
        identity = (entered.st_dev, entered.st_ino)
        ancestors = above.pop(place, frozenset())
        if identity in ancestors:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        above |= {os.path.join(place, name): ancestors | {identity} for name in folders}
        for name in sorted(names):
            if name.startswith("."):
                continue
            count += 1
            path = Path(place, name)
            if count > MOST_FILES:
                raise UserError(
                    f"benchmark.path={str(folder)!r} holds more than {MOST_FILES} files; valid: the folder of one "
                    "data set"
                )
            if _is_plain(path):
                yield path.relative_to(folder).as_posix(), path


def _is_plain(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return True  # whoever reads it says what is wrong
    if not stat.S_ISREG(mode) and path.suffix.lower() in DATA:
        raise UserError(
            f"benchmark.path: {str(path)!r} is no plain file; valid: a folder of plain files"
        )
    return stat.S_ISREG(mode)


def _visible(paths: Iterator[Path]) -> Iterator[Path]:
    return (path for path in paths if not path.name.startswith("."))
