"""The cells of each sweep: `<store>/sweeps/<id>.json`, written before the first cell runs.

The id follows from the command line and its run keys: the same command always has the same file, and another version of
the code, which has other run keys, another file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, UserError, first_words, tell_once
from espalier.harness.settings import read_section, read_value
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import read_json
from espalier.harness.store.files.folder_checks import below
from espalier.harness.store.row_text import amount_text

#: Version of the files; a file of another version is refused.
VERSION = 1


@dataclass(frozen=True)
class SweepCell:
    """One cell of a sweep.

    Attributes:
        key: its run key.
        model: name of its model; likewise `method`, `benchmark`, `ratio` and `keep`.
        label: hyper-parameters that differ from their default.
        samples: number of samples; None: all.
        line: overrides that select this cell alone.
    """

    key: str
    model: str
    method: str
    benchmark: str
    ratio: float
    label: str
    samples: int | None
    line: tuple[str, ...]
    keep: int | None = None

    @classmethod
    def of(cls, key: str, outline: Mapping[str, Any], line: Sequence[str]) -> SweepCell:
        """Return the cell of a run from the part of its row that is known before it runs."""
        names = {name: outline[name] for name in ("model", "method", "benchmark", "ratio")}
        label = outline["extra"]["label"] or ""
        return cls(
            key,
            **names,
            label=label,
            samples=outline["n_samples"],
            line=tuple(map(str, line)),
            keep=outline.get("keep"),
        )

    @property
    def title(self) -> str:
        """Name of the cell in status lines."""
        amount = amount_text(self.ratio, self.keep)
        return " ".join(filter(None, (self.model, self.method, self.label, amount, self.benchmark)))


@dataclass(frozen=True)
class Sweep:
    """A command and its cells."""

    name: str
    argv: tuple[str, ...]
    cells: tuple[SweepCell, ...]


def announce(store: Path, argv: Sequence[str], cells: Sequence[SweepCell]) -> Path:
    """Write the cells of a command, unless they are already written; return the file.

    Raises:
        StoreLost: the disk is full or cannot be written.
        UserError: the folder of sweeps is a link.
    """
    content = json.dumps([list(argv), [cell.key for cell in cells]])
    path = below(store, "sweeps") / f"{hashlib.sha256(content.encode()).hexdigest()[:12]}.json"
    if path.exists():
        with suppress(OSError):  # of another user
            os.utime(path, follow_symlinks=False)  # commands without a name use the newest file
        return path
    record = {
        "version": VERSION,
        "argv": list(argv),
        "submitted": time.time(),
        "cells": [asdict(cell) for cell in cells],
    }
    if store.is_dir() and not os.access(store, os.W_OK):
        return path  # all rows exist, or no cell would have been admitted
    durable.make_folder(path.parent)
    durable.replace(path, f"{json.dumps(record, indent=1)}\n".encode())
    return path


def find(store: Path, query: str | None) -> Sweep | None:
    """Return a sweep of a store; without a name the newest, or None if there is none.

    Args:
        store: its folder.
        query: the beginning of an id, the file itself, or the name of a preset (`+experiment=<name>`).

    Raises:
        UserError: there is no such sweep, or its file is damaged or of another version.
    """
    files = sorted((store / "sweeps").glob("*.json"), key=_changed)
    if query is None:
        return next(_readable(reversed(files)), None)
    matches = [path for path in files if path.stem.startswith(query) or path == Path(query)]
    if not matches:
        preset = f"experiment={query}"
        for sweep in _readable(reversed(files)):
            if preset in (text.lstrip("+") for text in sweep.argv):
                return sweep
    if not matches:
        newest = ", ".join(path.stem for path in reversed(files[-5:])) or "none"
        raise UserError(
            f"sweep={query!r} is none of {len(files)} in store={str(store)!r}; valid: {newest}, or a preset's name"
        )
    return _read(matches[-1])


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile, or a link to itself
        return 0.0


def _readable(files: Iterable[Path]) -> Iterator[Sweep]:
    """Yield the sweeps of files; a damaged file is reported and passed over."""
    for path in files:
        try:
            yield _read(path)
        except UserError as error:
            tell_once(f"passed over: {error}")


def _read(path: Path) -> Sweep:
    try:
        record = read_json(path)
        version = record["version"]
        if version == VERSION:
            cells = [read_section(SweepCell, "cell", {"keep": None, **c}) for c in record["cells"]]
            argv = read_value("argv", record["argv"], tuple[str, ...])
            return Sweep(path.stem, argv, tuple(cells))
    except FOREIGN as error:
        raise UserError(f"{path} is damaged ({first_words(error)}); valid: removing it") from error
    raise UserError(
        f"{path} is of version {version}; this version reads {VERSION}; valid: the version that wrote it, or another "
        "sweep"
    )
