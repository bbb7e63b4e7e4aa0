"""Rows out of the files that wandb leaves offline, without a server and without the store that they came from."""

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
    """Yield the records of a run's file; a torn end, which a killed process leaves, ends them."""
    with tempfile.TemporaryDirectory() as folder:
        # The library opens what it reads for writing.
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
    """Yield the files of each row that was logged offline below a wandb folder, as tables by file name.

    Raises:
        UserError: a file of a row is missing, or is not the one that was logged.
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


def _content(folder: Path, name: str, place: Path, digest: str) -> bytes:
    """Return a file of an artifact; where the folder has been moved, from where it lies now."""
    moved = folder / "data" / "artifacts" / "staging" / place.name
    found = next((one for one in (moved, place) if one.is_file()), None)
    content = None if found is None else found.read_bytes()
    if content is None or base64.b64encode(md5(content).digest()).decode() != digest:
        state = "is missing" if content is None else "has changed since it was logged"
        raise UserError(
            f"--rebuild: {name} {state}: {found or moved}; valid: the whole wandb folder of a store"
        )
    return content


def rebuild(folder: Path, store: Store) -> list[tuple[str, bool]]:
    """Commit the rows of a wandb folder to a store; return each key, and whether its row was missing there."""
    done = []
    for files in rows_of(folder):
        row = files["row.json"]
        directory = store.run(row["run_key"])
        missing = directory.row() is None
        if missing:
            directory.describe(files.get("spec.json", {}))
            directory.commit(row)
        done.append((row["run_key"], missing))
    return done
