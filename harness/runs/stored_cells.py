"""Finished runs found by their cells alone: computing a run key imports torch and the method, which takes seconds.

A run key is a function of the cell, the files of the package, installed packages, the checkpoint and the devices. A
file of `<store>/cells` holds the digest of all of these, the key, and the digest of its row. Where nothing has changed,
the row is the cell's. Cells that depend on more are not noted: those with files or classes of users, a draft, a judge,
a log, figures, another engine, or several processes.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from espalier.harness.config.compose import Command
from espalier.harness.config.composer import Cell
from espalier.harness.config.group_lists import CLASSES, PATHS
from espalier.harness.config.method_names import method_kind
from espalier.harness.errors import FOREIGN, StoreLost, UserError
from espalier.harness.paths import FOLDERS, ROOT, located
from espalier.harness.specs.hub_cache import file_of_hub
from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.harness.specs.plugins.installed import installed
from espalier.harness.store import RunDir
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import Digests, digest, read_json
from espalier.harness.store.files.folder_checks import below

#: Start of paths in this package; all of its files are hashed.
SHIPPED = "pkg://espalier/"

#: Keys and values of a cell that depends on nothing but the package and its checkpoint.
PLAIN: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("force",): (False,),
    ("curves",): (None,),
    ("report",): (None,),
    ("cluster", "name"): ("local",),
    ("log", "name"): ("none",),
    ("backend",): ({"name": "transformers"},),
    ("engine", "paired"): (0, "auto"),
    ("model", "weights"): ("trained",),
}


@dataclass(frozen=True)
class StoredCell:
    """A cell and the state of everything that its row depends on.

    Attributes:
        store: the folder of results.
        name: digest of the cell, the working folder and the machine.
        state: digest of files and packages.
    """

    store: Path
    name: str
    state: str

    @classmethod
    def of(cls, command: Command) -> StoredCell | None:
        """Return the only cell of a checked command in its present state; None if its row may depend on more.

        Cost: 0.1 s, one read of the package.
        """
        cell = command.cells[0]
        if command.sweep or command.folders or not _is_plain(cell):
            return None
        model, store = cell["model"], located(cell["store"])
        checkpoint = model["path"] or file_of_hub(model["hub"], "config.json", model["revision"])
        if checkpoint is None:
            return None
        files = [
            path
            for folder in (*sorted(FOLDERS), "conf")
            for path in (ROOT / folder).rglob("*")
            if "__pycache__" not in path.parts and path.is_file()
        ]
        packages = [path.name for place in sys.path for path in Path(place).glob("*.*-info")]
        devices = [os.environ.get("CUDA_VISIBLE_DEVICES"), *sorted(Path("/dev").glob("nvidia*"))]
        calibrations = Digests().files(
            filter(Path.is_file, (store / "calibration").glob("*")), store
        )
        code = [Digests().files(files, ROOT), sorted(packages), sys.version]
        return cls(
            store,
            name=digest([repr(cell), Path.cwd(), platform.node(), devices])[:16],
            state=digest([code, checkpoint, calibrations]),
        )

    @property
    def file(self) -> Path:
        """The note in the store."""
        return self.store / "cells" / f"{self.name}.json"

    def row(self) -> dict[str, Any] | None:
        """Return the noted row; None without one, and if the row or the state is another one."""
        try:
            note = read_json(self.file)
            run = RunDir(self.store / "runs" / note["key"])
            is_current = note == self._note(run)
        except FOREIGN:
            return None
        row = run.row(complete=True) if is_current else None
        return None if row is None else row | {"status": "cached"}

    def remember(self, row: Mapping[str, Any]) -> None:
        """Note the run of the cell's row; nothing is written to a store that cannot be written."""
        run = RunDir(self.store / "runs" / row["run_key"])
        if not row["extra"]["failures"] and os.access(self.store, os.W_OK):
            with suppress(StoreLost, UserError, OSError):
                below(self.store, "cells").mkdir(exist_ok=True)
                durable.replace(self.file, f"{json.dumps(self._note(run))}\n".encode())

    def _note(self, run: RunDir) -> dict[str, str]:
        row = Digests().file(run.path / "row.json")
        return {"key": run.path.name, "row": row, "state": self.state}


def _is_plain(cell: Cell) -> bool:
    """Return whether the row of a cell depends on no other files than those of the package and the checkpoint."""
    values = [cell[group].get(key) for group, keys in PATHS.items() for key in keys]
    paths = [path for value in values for path in (value if isinstance(value, list) else [value])]
    codes = [
        *(cell[group].get(key) for group, keys in CLASSES.items() for key in keys),
        cell["compressor"].get("code"),
    ]
    kinds = {method_kind(cell[group]["name"]) for group in ("method", "compressor")}
    return (
        all(reduce(getitem, keys, cell) in valid for keys, valid in PLAIN.items())
        and all(path.startswith(SHIPPED) for path in filter(None, paths))
        and not any(map(CodeReference.parse, filter(None, codes)))
        and kinds <= {"reducer", "compressor", "denoiser"}
        and "judge" not in cell["benchmark"]["needs"]
        and "WORLD_SIZE" not in os.environ
        and not installed()
    )
