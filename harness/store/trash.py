"""Where `gc` puts what it takes out of a store: `<store>/.trash/<time>/`, with the paths that it had in the store.

No reader of a store looks there. What is moved back is in the store again; `gc --purge` frees the disk.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from errno import ENOTDIR
from pathlib import Path
from typing import NamedTuple

from espalier.harness.errors import StoreLost, UserError, first_words
from espalier.harness.store.claims import claim
from espalier.harness.store.files.lease import LEASE, USUAL

NAME = ".trash"


class Waste(NamedTuple):
    """A file or a folder that nobody needs.

    Attributes:
        path: it.
        why: nobody needs it.
        size: its bytes.
        run: the folder of the run that must not be computed while it is moved; None where that does not matter.
    """

    path: Path
    why: str
    size: int
    run: Path | None = None


class Moved(NamedTuple):
    """What a move did: the folder that has it, how many things with how many bytes, and what stayed, with reasons."""

    folder: Path
    things: int
    size: int
    stayed: Sequence[str]


def move(store: Path, found: Iterable[Waste]) -> Moved:
    """Move things out of a store into a new folder of its trash; what cannot be moved stays and is named.

    Raises:
        UserError: the trash cannot be written.
    """
    folder = _new_folder(store)
    count = size = 0
    stayed = []
    for waste in found:
        target = folder / waste.path.relative_to(store)
        try:
            # A process that computes the run keeps it: leases of other machines count, too.
            holding = nullcontext(True) if waste.run is None else claim(waste.run, 0.0, USUAL, ())
            with holding as held:
                if not held:
                    stayed.append(f"{waste.path}: stays, a command computes the run now")
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(waste.path, target)
            if waste.run == waste.path:
                # The run's own were held a moment ago, by this process.
                for name in (LEASE, "lock"):
                    (target / name).unlink(missing_ok=True)
        except FileNotFoundError:  # another command has removed it
            continue
        except (OSError, shutil.Error, StoreLost, UserError) as error:
            stayed.append(f"{waste.path}: stays, it cannot be moved ({first_words(error)})")
            continue
        count, size = count + 1, size + waste.size
    with suppress(OSError):  # it holds something
        folder.rmdir()
    return Moved(folder, count, size, stayed)


def contents(store: Path) -> list[Waste]:
    """Return what the trash holds, a folder for each `gc`, the oldest first."""
    try:
        folders = sorted((store / NAME).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unusable(store, error) from error
    return [Waste(path, "moved there by gc", size_of(path)) for path in folders]


def purge(found: Iterable[Waste]) -> int:
    """Remove what the trash holds; return the bytes.

    Raises:
        StoreLost: something cannot be removed.
    """
    freed = 0
    for waste in found:
        try:
            if waste.path.is_dir() and not waste.path.is_symlink():
                shutil.rmtree(waste.path)
            else:
                waste.path.unlink()
        except OSError as error:
            raise StoreLost(
                f"store: {waste.path} cannot be removed: {first_words(error)}; {freed:,} bytes were freed before"
            ) from error
        freed += waste.size
    return freed


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder that can be looked at; no link is followed."""
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
    """Return a folder of the trash that no other `gc` has."""
    name = time.strftime("%Y-%m-%dT%H-%M-%S")
    number = 0
    while True:
        folder = store / NAME / (f"{name}-{number}" if number else name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            if folder.parent.is_dir():
                continue
            raise _unusable(store, NotADirectoryError(ENOTDIR, "it is no folder")) from None
        except OSError as error:
            raise _unusable(store, error) from error
        return folder


def _unusable(store: Path, error: OSError) -> UserError:
    return UserError(
        f"store: {store / NAME} cannot be used ({first_words(error)}); valid: a folder that you may write"
    )
