"""The trash of a store, `<store>/.trash/<time>/`, into which `gc` moves files with their paths relative to the store.

No reader of a store looks there. Files moved back are in the store again; `gc --purge` frees the disk.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from errno import ENOTDIR
from pathlib import Path
from typing import NamedTuple

from espalier.harness.errors import StoreLost, UserError, first_words
from espalier.harness.store.claims import claim
from espalier.harness.store.files.folder_checks import below
from espalier.harness.store.files.lease import DEFAULT_TERMS, LEASE

NAME = ".trash"

#: Names of the folders that `gc` makes there.
FOLDER = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(-\d+)?")


class Waste(NamedTuple):
    """A file or a folder that is no longer needed.

    Attributes:
        path: the file or folder.
        why: the reason.
        size: its bytes.
        run: the folder of the run that must not be computed while it is moved; None if that does not matter.
    """

    path: Path
    why: str
    size: int
    run: Path | None = None


class MoveResult(NamedTuple):
    """The result of a move: target folder, number of items, their bytes, and reasons for items that stayed."""

    folder: Path
    item_count: int
    size: int
    stayed: Sequence[str]


def move(store: Path, waste_items: Iterable[Waste]) -> MoveResult:
    """Move items out of a store into a new folder of its trash; items that cannot be moved stay and are listed.

    Raises:
        UserError: the trash cannot be written.
    """
    folder = _new_folder(store)
    count = size = 0
    stayed = []
    for waste in waste_items:
        target = folder / waste.path.relative_to(store)
        try:
            # Skip runs that a process computes now, on this machine or, by their leases, on another.
            holding = (
                nullcontext(True) if waste.run is None else claim(waste.run, 0.0, DEFAULT_TERMS, ())
            )
            with holding as claimed:
                if not claimed:
                    stayed.append(f"{waste.path}: stays, a command computes the run now")
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(waste.path, target)
            if waste.run == waste.path:
                # Lock files of the claim that this process held a moment ago.
                for name in (LEASE, "lock"):
                    (target / name).unlink(missing_ok=True)
        except FileNotFoundError:  # another command has removed it
            continue
        except (OSError, shutil.Error, StoreLost, UserError) as error:
            stayed.append(f"{waste.path}: stays, it cannot be moved ({first_words(error)})")
            continue
        count, size = count + 1, size + waste.size
    with suppress(OSError):  # it is not empty
        folder.rmdir()
    return MoveResult(folder, count, size, stayed)


def contents(store: Path) -> list[Waste]:
    """Return the content of the trash, a folder for each `gc`, the oldest first; nothing else that lies there.

    Raises:
        UserError: the trash is a link, or cannot be read.
    """
    try:
        folders = sorted(below(store, NAME).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unusable(store, error) from error
    return [
        Waste(path, "moved there by gc", size_of(path))
        for path in folders
        if FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def purge(waste_items: Iterable[Waste]) -> int:
    """Remove items of the trash; return the bytes.

    Raises:
        StoreLost: an item cannot be removed.
    """
    freed = 0
    for waste in waste_items:
        try:
            shutil.rmtree(waste.path)
        except OSError as error:
            raise StoreLost(
                f"store: {waste.path} cannot be removed: {first_words(error)}; {freed:,} bytes were freed before"
            ) from error
        freed += waste.size
    return freed


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all readable files below a folder; links are not followed."""
    paths = [path]
    for folder, _, names in os.walk(path):
        paths += [Path(folder, name) for name in names]
    total = 0
    for file in paths:
        try:
            total += 0 if file.is_dir() else file.lstat().st_size
        except OSError:
            continue
    return total


def _new_folder(store: Path) -> Path:
    """Return a new folder of the trash."""
    name = time.strftime("%Y-%m-%dT%H-%M-%S")
    number = 0
    while True:
        folder = below(store, NAME) / (f"{name}-{number}" if number else name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            if folder.parent.is_dir():
                continue
            raise _unusable(store, NotADirectoryError(ENOTDIR, "it is not a folder")) from None
        except OSError as error:
            raise _unusable(store, error) from error
        return folder


def _unusable(store: Path, error: OSError) -> UserError:
    return UserError(
        f"store: {store / NAME} cannot be used ({first_words(error)}); valid: a folder that you may write"
    )
