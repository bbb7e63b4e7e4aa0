"""Marks of runs logged to Weights & Biases: `<store>/wandb/mirrored/<run key>.json`, written after a run is logged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

from espalier.harness.errors import FOREIGN
from espalier.harness.store.files import durable
from espalier.harness.store.files.folder_checks import below
from espalier.harness.store.files.untrusted_json import read_json

#: Seconds to wait for another command that logs the same run.
PATIENCE = 60.0


def digest_of(row: Mapping[str, Any]) -> str:
    """Return a digest of a row, which distinguishes it from a row recomputed with `force=true`."""
    return sha256(json.dumps(dict(row), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class MirrorMark:
    """The mark of one run; `root` is the wandb folder of its store."""

    root: Path
    key: str

    @classmethod
    def of(cls, store: Path, key: str) -> MirrorMark:
        """Return the mark of a run of a store; raises UserError if the folder is a link."""
        return cls(below(store, "wandb"), key)

    @classmethod
    def all(cls, store: Path) -> list[MirrorMark]:
        """Return the marks of a store, ordered by key."""
        paths = sorted(below(store, "wandb", "mirrored").glob("*.json"))
        return [cls.of(store, path.stem) for path in paths]

    @property
    def path(self) -> Path:
        """The mark's file."""
        return self.root / "mirrored" / f"{self.key}.json"

    def read(self) -> dict[str, Any]:
        """Return the content; empty if the file is missing or damaged, and the run is then logged again."""
        try:
            content = read_json(self.path)
        except FOREIGN:
            return {}
        return content if isinstance(content, dict) else {}

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Return whether exactly this row has been logged."""
        return self.read().get("row_sha256") == digest_of(row)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from logging the run meanwhile.

        Raises:
            filelock.Timeout: another command still logs it after `PATIENCE` seconds.
        """
        below(self.root, "mirrored").mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock"), timeout=PATIENCE):
            yield

    def folders(self) -> list[Path]:
        """Return the offline runs of the key."""
        folders = self.root.glob(f"offline-run-*-{self.key}")
        return sorted(folder for folder in folders if not folder.is_symlink())

    def clear(self) -> None:
        """Remove the mark and the outdated offline runs."""
        self.path.unlink(missing_ok=True)
        for folder in self.folders():
            shutil.rmtree(folder)

    def write(self, row: Mapping[str, Any], options: Mapping[str, Any], folder: Path) -> None:
        """Record that and where a row has been logged, by these options of `wandb.init`."""
        content = {
            "row_sha256": digest_of(row),
            **{name: options.get(name) for name in ("mode", "project", "group")},
            "folder": folder.name,
            "uploaded": options.get("mode") == "online",
        }
        durable.replace(self.path, json.dumps(content, indent=1).encode())

    def uploaded(self) -> None:
        """Record that the server has the run."""
        durable.replace(self.path, json.dumps({**self.read(), "uploaded": True}, indent=1).encode())
