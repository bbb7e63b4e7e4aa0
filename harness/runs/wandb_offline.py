"""Restore rows from wandb's offline files, without a server and without the original store."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from hashlib import md5
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import ArtifactRecord, Record
from wandb.sdk.internal.datastore import DataStore

from espalier.harness.errors import UserError
from espalier.harness.runs.wandb_content import ARTIFACT
from espalier.harness.store import Store


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a run's file; a truncated end, as a killed process leaves, ends them."""
    with tempfile.TemporaryDirectory() as folder:
        # The library opens files for writing, so read a copy.
        copy = shutil.copy(path, folder)
        data = DataStore()
        try:
            data.open_for_scan(copy)
            while (raw := data.scan_data()) is not None:
                record = Record()
                record.ParseFromString(raw)
                yield record
        except AssertionError:
            return


def rows_of(folder: Path) -> Iterator[dict[str, Mapping[str, Any]]]:
    """Yield the files of each row logged offline below a wandb folder, as tables by file name.

    Raises:
        UserError: a file of a row is missing, or has changed since it was logged.
    """
    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") == "artifact" and record.artifact.type == ARTIFACT:
                yield _files(folder, record.artifact)


def _files(folder: Path, artifact: ArtifactRecord) -> dict[str, Mapping[str, Any]]:
    return {
        entry.path: json.loads(_content(folder, entry.path, Path(entry.local_path), entry.digest))
        for entry in artifact.manifest.contents
    }


def _content(folder: Path, name: str, original: Path, digest: str) -> bytes:
    """Return a file of an artifact, from its original place or from the moved wandb folder."""
    moved = folder / "data" / "artifacts" / "staging" / original.name
    path = next((candidate for candidate in (moved, original) if candidate.is_file()), None)
    content = None if path is None else path.read_bytes()
    if content is None or base64.b64encode(md5(content).digest()).decode() != digest:
        state = "is missing" if content is None else "has changed since it was logged"
        raise UserError(
            f"--rebuild: {name} {state}: {path or moved}; valid: the whole wandb folder of a store"
        )
    return content


def rebuild(folder: Path, store: Store) -> list[tuple[str, bool]]:
    """Commit the rows of a wandb folder to a store; return each key, and whether its row was missing."""
    restored = []
    for files in rows_of(folder):
        row = files["row.json"]
        directory = store.run(row["run_key"])
        missing = directory.row() is None
        if missing:
            directory.describe(files.get("spec.json", {}))
            directory.commit(row)
        restored.append((row["run_key"], missing))
    return restored
