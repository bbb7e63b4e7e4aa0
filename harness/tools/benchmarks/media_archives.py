"""Unpack archives of media where lmms-eval's tasks look for them; an interrupted run continues."""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

#: A piece of an archive that was cut for the upload: `videos.tar.part.aa`, `videos_1.tar`.
TAR = re.compile(r"^(?P<stem>.+?)(_\d+)?\.tar(\..+)?$")


def archives(folder: Path) -> list[list[Path]]:
    """Return the archives below a folder, each as its pieces in order: zip files, and tar files cut or whole."""
    groups = [[path] for path in sorted(folder.rglob("*.zip"))]
    pieces = defaultdict(list)
    for path in sorted(folder.rglob("*.tar*")):
        match = TAR.match(path.name)
        if match is not None and path.is_file():
            # `x.tar.gz` is no piece of `x.tar`.
            cut = ".part" in path.name or match[2] is not None
            pieces[path.parent / (match["stem"] if cut else path.name)].append(path)
    return groups + list(pieces.values())


def unpack(folder: Path, target: Path, tell: Callable[[str], None]) -> None:
    """Unpack every archive below a folder into another, which appears under its name only when all is there.

    lmms-eval takes an existing folder for complete. So the files are unpacked in `<target>.partial`, where files of the
    right size are not written again. Members outside of the folder are refused.

    Raises:
        OSError, zipfile.BadZipFile, tarfile.TarError: the disk is full, or an archive is damaged.
    """
    if target.exists():
        return
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    groups = archives(folder)
    for number, pieces in enumerate(groups, 1):
        tell(f"unpacking {pieces[0].name} ({number} of {len(groups)}) into {partial}")
        if pieces[0].suffix == ".zip":
            _unzip(pieces[0], partial)
        else:
            _untar(pieces, partial)
    partial.rename(target)


def link(folder: Path, target: Path) -> None:
    """Make a name for a folder, in the place of an older link."""
    if target.is_symlink():
        target.unlink()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(folder, target)


def _unzip(file: Path, target: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            path = target / member.filename
            if not (path.is_file() and path.stat().st_size == member.file_size):
                archive.extract(member, target)


def _untar(pieces: Sequence[Path], target: Path) -> None:
    # Pieces of 100 GB are read one after the other, never joined on the disk.
    with tarfile.open(fileobj=_Joined(pieces), mode="r|*") as archive:
        for member in archive:
            path = target / member.name
            if not (path.is_file() and path.stat().st_size == member.size):
                archive.extract(member, target, filter="data")


class _Joined(io.RawIOBase):
    """Reads files one after the other as one."""

    def __init__(self, pieces: Sequence[Path]) -> None:
        self._left = list(pieces)
        self._open: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._open is not None or self._left:
            if self._open is None:
                self._open = self._left.pop(0).open("rb")
            count = self._open.readinto(buffer)  # type: ignore[attr-defined]
            if count:
                return int(count)
            self._open.close()
            self._open = None
        return 0

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        super().close()


def free(folder: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(existing).free
