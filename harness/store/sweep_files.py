"""Which cells a sweep asked for: `<store>/sweeps/<id>.json`, written before the first of them runs.

The id follows from the command line and its run keys, so the same command has one file however often it is given, and
another version of the code, whose runs are other runs, another one.
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

from espalier.harness.errors import UserError, foreign, tell_once
from espalier.harness.store.files import durable
from espalier.harness.store.files.untrusted_json import read_json

#: Of the files; one of another version is none.
VERSION = 1


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep.

    Attributes:
        key: its run.
        model: name of its model, and so on for `method`, `benchmark` and `ratio`.
        label: hyper-parameters off their default.
        samples: how many are asked for; None: all.
        line: overrides that give this cell alone.
    """

    key: str
    model: str
    method: str
    benchmark: str
    ratio: float
    label: str
    samples: int | None
    line: tuple[str, ...]

    @classmethod
    def of(cls, key: str, outline: Mapping[str, Any], line: Sequence[str]) -> Cell:
        """Return the cell of a run from what is known of its row before it runs."""
        names = {name: outline[name] for name in ("model", "method", "benchmark", "ratio")}
        label = outline["extra"]["label"] or ""
        return cls(
            key, **names, label=label, samples=outline["n_samples"], line=tuple(map(str, line))
        )

    @property
    def title(self) -> str:
        """What a line about the cell calls it."""
        return " ".join(
            filter(None, (self.model, self.method, self.label, f"{self.ratio:g}", self.benchmark))
        )


@dataclass(frozen=True)
class Sweep:
    """A command and its cells."""

    name: str
    argv: tuple[str, ...]
    submitted: float
    cells: tuple[Cell, ...]


def announce(store: Path, argv: Sequence[str], cells: Sequence[Cell]) -> Path:
    """Write which cells a command has, unless that is written already; return the file.

    Raises:
        StoreLost: the disk is full or cannot be written.
    """
    asked = json.dumps([list(argv), [cell.key for cell in cells]])
    path = store / "sweeps" / f"{hashlib.sha256(asked.encode()).hexdigest()[:12]}.json"
    if path.exists():
        with suppress(OSError):  # of another user
            os.utime(path)  # the newest command is the one that is meant where none is named
        return path
    told = {
        "version": VERSION,
        "argv": list(argv),
        "submitted": time.time(),
        "cells": [asdict(cell) for cell in cells],
    }
    if store.is_dir() and not os.access(store, os.W_OK):
        return path  # its rows are all there, or no cell would have been admitted
    durable.make_folder(path.parent)
    durable.replace(path, f"{json.dumps(told, indent=1)}\n".encode())
    return path


def find(store: Path, asked: str | None) -> Sweep | None:
    """Return a sweep of a store; without a name the newest, None where there is none.

    Args:
        store: its folder.
        asked: the beginning of an id, the file itself, or the name of a preset (`+experiment=<name>`).

    Raises:
        UserError: there is no such sweep, or its file is damaged or of another version.
    """
    files = sorted((store / "sweeps").glob("*.json"), key=_changed)
    if asked is None:
        return next(_readable(reversed(files)), None)
    named = [path for path in files if path.stem.startswith(asked) or path == Path(asked)]
    if not named:
        preset = f"experiment={asked}"
        for sweep in _readable(reversed(files)):
            if preset in (text.lstrip("+") for text in sweep.argv):
                return sweep
    if not named:
        known = ", ".join(path.stem for path in reversed(files[-5:])) or "none"
        raise UserError(
            f"sweep={asked!r} is none of {len(files)} in store={str(store)!r}; valid: {known}, or a preset's name"
        )
    return _read(named[-1])


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile, or a link to itself
        return 0.0


def _readable(files: Iterable[Path]) -> Iterator[Sweep]:
    """Yield the sweeps of files; one that is damaged is named and passed over."""
    for path in files:
        try:
            yield _read(path)
        except UserError as error:
            tell_once(f"passed over: {error}")


def _read(path: Path) -> Sweep:
    with foreign(f"{path} is damaged", "removing it"):
        told = read_json(path)
        if told["version"] != VERSION:
            raise UserError(
                f"{path} is of version {told['version']}; this version reads {VERSION}; valid: the version that wrote "
                "it, or another sweep"
            )
        cells = tuple(map(_cell, told["cells"]))
        argv = tuple(map(_text, told["argv"]))
        return Sweep(path.stem, argv, float(told["submitted"]), cells)


def _cell(told: Mapping[str, Any]) -> Cell:
    names = {name: _text(told[name]) for name in ("key", "model", "method", "benchmark", "label")}
    samples = None if told["samples"] is None else int(told["samples"])
    line = tuple(map(_text, told["line"]))
    return Cell(**names, ratio=float(told["ratio"]), samples=samples, line=line)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value
