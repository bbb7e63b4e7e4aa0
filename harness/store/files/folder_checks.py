"""Checks, made at the start of a run, of folders that it writes to at its end."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from espalier.harness.errors import UserError, foreign
from espalier.harness.paths import DEMO, short_path


def below(store: Path, *names: str) -> Path:
    """Return a folder of a store, which need not exist yet.

    Raises:
        UserError: it or a folder above it in the store is a link, so that it may lie elsewhere.
    """
    path = store
    for name in names:
        path = path / name
        if path.is_symlink():
            raise UserError(
                f"store={str(store)!r}: {path} is a link, which may lead out of the store; valid: a folder"
            )
    return path


def check_folder(key: str, folder: Path) -> None:
    """Raise UserError unless files can be made in `folder`, which need not exist yet; no file remains.

    Args:
        key: the config key or the variable that names the folder.
        folder: the folder.
    """
    with foreign(f"{key}: folder {str(folder)!r} cannot be written", "a writable folder"):
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        tempfile.TemporaryFile(dir=existing).close()


def check_file(key: str, file: Path) -> None:
    """Raise UserError unless a file can be made or replaced; no file remains.

    Args:
        key: the option that names the file.
        file: the file; its folder need not exist yet.
    """
    if os.path.lexists(file) and not file.is_file():
        raise UserError(f"{key}={str(file)!r} is not a file; valid: another path")
    check_folder(key, file.parent)


def existing_store(folder: Path, key: str = "--store") -> Path:
    """Return the folder of an existing store to read rows from.

    Raises:
        UserError: it does not exist, or is a file.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{key}={str(folder)!r} {problem}; valid: a run store, {short_path(DEMO)}")
    return folder


def check_files(key: str, stem: Path, suffixes: tuple[str, ...]) -> None:
    """Raise UserError unless `<stem>.<suffix>` can be written for each suffix.

    Raises:
        UserError: the folder cannot be written, the stem already has a suffix, or a target exists and is not a file.
    """
    if stem.suffix.lstrip(".") in suffixes:
        raise UserError(
            f"{key}={str(stem)!r} must be a path without suffix: {', '.join(suffixes)} are written; "
            f"valid: {stem.with_suffix('')}"
        )
    for suffix in suffixes:
        file = stem.with_name(f"{stem.name}.{suffix}")
        if file.exists() and not file.is_file():
            raise UserError(
                f"{key}={str(stem)!r}: {str(file)!r} is not a file; valid: another path"
            )
    check_folder(key, stem.parent)
