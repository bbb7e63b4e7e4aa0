"""Copies of the hub's data sets in a user's folder (`benchmark.path`): their folders and a digest of their content."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.errors import FOREIGN, StoreLost, UserError
from espalier.harness.store.files.digests import Digests, digest, read_json
from espalier.harness.store.files.durable import replace

#: Maximum number of names in an error line.
NAMED = 8

#: Endings of files that hold samples or their media.
DATA = frozenset(
    (
        *(".parquet", ".arrow", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".xml", ".py", ".md"),
        *(".zip", ".tar", ".gz", ".tgz", ".xz", ".zst", ".7z"),
        *(".npy", ".npz", ".h5", ".mdb", ".db", ".pkl", ".pt"),
        *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".pdf"),
        *(".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".wav", ".mp3", ".flac"),
    )
)

#: Nanoseconds: a file changed more recently may change again within the same clock tick, so it is read again next time.
SETTLED = 2_000_000_000


@dataclass(frozen=True)
class Copies:
    """A folder that holds the copy of one repository, or of several as `<owner>/<name>`.

    Attributes:
        folder: `benchmark.path`.
        main: the benchmark's own data set (`benchmark.dataset.path`); None: any that its task loads.
    """

    folder: Path
    main: str | None = None

    @property
    def several(self) -> bool:
        """Whether the folder holds repositories by owner and name rather than the files of one."""
        return not any(
            path.is_file() for depth in ("*", "*/*") for path in _visible(self.folder.glob(depth))
        )

    def check(self) -> None:
        """Raise UserError if the folder does not exist, or has no file of the benchmark's own data set."""
        if not self.folder.is_dir():
            raise UserError(
                f"benchmark.path={str(self.folder)!r} is not a folder; valid: one that holds the data set's repository"
            )
        folder = self.folder if self.main is None else self.find(self.main)
        if not any(path.suffix.lower() in DATA for _, path in _files(folder)):
            raise UserError(
                f"benchmark.path={str(self.folder)!r} holds no file of a data set; valid: a folder with .parquet, "
                ".json, .csv or the like"
            )

    def find(self, name: str) -> Path:
        """Return the folder of a data set's copy.

        Raises:
            UserError: there is none, or the folder is that of another data set.
        """
        copy = self.folder / name
        if copy.is_dir():
            return copy
        if self.several or (self.main is not None and self.main != name):
            names = ", ".join(self._names()) or "nothing"
            raise UserError(
                f"benchmark.path={str(self.folder)!r} has no data set {name!r}; there is: {names}; "
                f"valid: a folder that holds the files of its repository, or these in {name}"
            )
        return self.folder

    def revision(self, digests: Digests) -> str:
        """Return a digest of the names and contents of the files that a run of the benchmark reads.

        Without its own data set these are all files of the folder. Cost: one read of each file; digests of files
        with unchanged size and time of change are cached next to the cache of data sets.
        """
        return revision(self.digested, digests)

    @property
    def digested(self) -> Path:
        """The folder that `revision` covers; raises UserError as `find`."""
        return self.folder if self.main is None else self.find(self.main)

    def _names(self) -> list[str]:
        pattern = "*/*" if self.several else "*"
        names = sorted(
            path.relative_to(self.folder).as_posix() for path in _visible(self.folder.glob(pattern))
        )
        return [*names[:NAMED], *(["..."] if len(names) > NAMED else [])]


def cache_folder() -> Path:
    """Return where Hugging Face's `datasets` keeps prepared data, by the rules of that library."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    named = os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets")
    return Path(os.path.expandvars(named)).expanduser()


def revision(folder: Path, digests: Digests) -> str:
    """Return a digest of the names and contents of a folder's files; hidden files and folders do not count."""
    return digest(content_listing(str(folder.absolute()), _files(folder), digests))


def content_listing(
    source: object, files: Iterable[tuple[str, Path]], digests: Digests
) -> list[tuple[str, str]]:
    """Return the name and the content's digest of each file.

    Digests of files with unchanged size and time of change are cached next to the cache of data sets.

    Args:
        source: plain data that names the files' origin; the cache has one file for each.
        files: names, and paths.
        digests: of this process.

    Raises:
        UserError: a file cannot be read.
    """
    memory = cache_folder() / "espalier" / f"{digest(source)[:16]}.json"
    former, current = _cached_digests(memory), {}
    listing = []
    for name, path in files:
        try:
            stat_result = path.stat()
            stamp = [stat_result.st_size, stat_result.st_mtime_ns]
            entry = former.get(name)
            content = (
                str(entry[2]) if entry is not None and entry[:2] == stamp else digests.file(path)
            )
        except OSError as error:
            raise UserError(
                f"benchmark.path: {str(path)!r} cannot be read: {error.strerror or error}; valid: a whole copy"
            ) from error
        if time.time_ns() - stat_result.st_mtime_ns > SETTLED:
            current[name] = [*stamp, content]
        listing.append((name, content))
    if current != former:
        # A cache that cannot be written only costs time; preparing data there reports it.
        with suppress(OSError, StoreLost):
            memory.parent.mkdir(parents=True, exist_ok=True)
            replace(memory, json.dumps(current).encode())
    return listing


def _cached_digests(memory: Path) -> dict[str, list[object]]:
    try:
        table = read_json(memory)
        return {str(name): [*mark] for name, mark in table.items() if len(mark) == 3}
    except FOREIGN:
        return {}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each plain file; circular links are followed once.

    Raises:
        UserError: a folder cannot be listed, or a data file is a pipe or the like.
    """

    def stop(error: OSError) -> None:
        raise UserError(
            f"benchmark.path: {error.filename!r} cannot be listed: {error.strerror}; valid: a folder that you may read"
        ) from error

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
            path = Path(place, name)
            if _is_plain(path):
                yield path.relative_to(folder).as_posix(), path


def _is_plain(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return True  # the reader reports the problem
    if not stat.S_ISREG(mode) and path.suffix.lower() in DATA:
        raise UserError(
            f"benchmark.path: {str(path)!r} is not a plain file; valid: a folder of plain files"
        )
    return stat.S_ISREG(mode)


def _visible(paths: Iterator[Path]) -> Iterator[Path]:
    return (path for path in paths if not path.name.startswith("."))
