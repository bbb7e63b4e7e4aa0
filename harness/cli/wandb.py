"""Upload runs logged offline to Weights & Biases, or rebuild a store from a wandb folder.

Without `--dry` each run is uploaded by wandb's own `sync` and then read back from the server, because neither its
output nor its exit code nor its marks prove the upload. `--rebuild` commits the rows of a wandb folder to a store that
lacks them, from the files alone. Exit codes: 0 done; 1 a run could not be confirmed on the server; 2 bad input.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import md5
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError, foreign, plain, print_lines
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.runs.wandb_log import SWEEP, MirrorMark, logs, mode
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.specs.secrets import masked, scrub, wandb_keys
from espalier.harness.store import RUN_KEY, Store
from espalier.harness.store.files.folder_checks import existing_store

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

#: Timeouts in seconds for the upload of one run and for a response of the server.
UPLOAD, ASK = 300, 20


def waiting(store: Path) -> list[MirrorMark]:
    """Return the marks of runs that are on this disk and not known to be on the server."""
    return [mark for mark in MirrorMark.all(store) if not mark.read().get("uploaded")]


def listing(store: Path) -> list[str]:
    """Return a line for each run that would be uploaded, and a total."""
    lines, total, marks = [], 0, waiting(store)
    for mark in marks:
        files = [path for folder in mark.folders() for path in folder.rglob("*") if path.is_file()]
        size, content = sum(path.stat().st_size for path in files), mark.read()
        total += size
        lines.append(
            f"{mark.key}: {content.get('folder')} ({size / 1e3:.0f} kB), project {content.get('project')}, "
            f"{content.get('group') or 'no group'}"
        )
    marked = {mark.key for mark in MirrorMark.all(store)}
    lines += [
        f"{path.name}: incomplete; the same command logs it again"
        for path in sorted((store / "wandb").glob("offline-run-*"))
        if path.name.rpartition("-")[2] not in marked
    ]
    return [*lines, f"{len(marks)} runs to upload, {total / 1e6:.1f} MB"]


def upload(mark: MirrorMark, row: Mapping[str, Any] | None) -> str | None:
    """Upload one run; return None if the server has it, else why it is not known to."""
    folders = mark.folders()
    if not folders:
        return "its folder is missing; running it again logs it again"
    content = mark.read()
    command = [sys.executable, "-m", "wandb", "sync", "--id", mark.key, str(folders[-1])]
    command += ["--project", content["project"]] if content.get("project") else []
    # wandb writes its own log below WANDB_DIR, else below the working directory.
    with TemporaryDirectory() as elsewhere:
        try:
            subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=UPLOAD,
                check=False,
                env=os.environ | {"WANDB_DIR": elsewhere},
            )
        except subprocess.TimeoutExpired:
            return f"`wandb sync` has not ended after {UPLOAD} s"
        finally:
            scrub(logs(mark.root, mark.key), wandb_keys())
    trouble = missing_there(content.get("project"), mark.key, row)
    if trouble is None:
        mark.uploaded()
    return trouble


def missing_there(project: str | None, key: str, row: Mapping[str, Any] | None) -> str | None:
    """Return the part of a run, or a comparison (no `row`), missing on the server; None if complete."""
    # wandb takes a second to import and need not be installed.
    import wandb

    try:
        run = wandb.Api(timeout=ASK).run(f"{project or 'uncategorized'}/{key}")
        summary = dict(run.summary)
        logged = any(
            logged_artifact.name.startswith(f"row-{key}")
            for logged_artifact in run.logged_artifacts()
        )
    except Exception as error:  # a third-party service can fail in any way
        line = next(iter(str(error).splitlines()), "")
        return f"cannot be read back: {type(error).__name__}: {plain(masked(line, wandb_keys()))[:200]}"
    metrics = {} if row is None else row["metrics"]
    expected = {name: values["value"] for name, values in metrics.items()}
    if (
        summary.get("run_key") != key
        or {name: summary.get(f"metrics/{name}") for name in expected} != expected
    ):
        return "read back with other metrics"
    return None if logged or row is None else "read back without its row"


def send(store: Path) -> int:
    """Upload all waiting runs, a line each; return the exit code."""
    marks = waiting(store)
    if marks and mode() == "offline":
        raise UserError(
            "wandb_sync: WANDB_API_KEY is not set, or the server does not respond; valid: --dry, which needs neither"
        )
    failed = 0
    for mark in marks:
        row = None if mark.key.startswith(SWEEP) else Store(store).run(mark.key).row()
        if not mark.key.startswith(SWEEP) and (row is None or not mark.matches(row)):
            trouble: str | None = "the store has another row; the same command logs it again"
        else:
            trouble = upload(mark, row)
        failed += trouble is not None
        print_lines(f"{mark.key}: {'uploaded' if trouble is None else f'not uploaded: {trouble}'}")
    print(f"{len(marks) - failed} of {len(marks)} runs uploaded and read back")
    return 1 if failed else 0


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a run's file; a truncated end, as a killed process leaves, ends them."""
    # wandb takes a second to import and need not be installed.
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    with TemporaryDirectory() as folder:
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
    # wandb takes a second to import and need not be installed.
    from espalier.harness.runs.wandb_content import ARTIFACT

    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        with foreign(f"--rebuild: {path} cannot be read", "the whole wandb folder of a store"):
            for record in records(path):
                kind = record.WhichOneof("record_type")
                if kind == "artifact" and record.artifact.type == ARTIFACT:
                    yield {
                        entry.path: json.loads(
                            _content(folder, entry.path, Path(entry.local_path), entry.digest)
                        )
                        for entry in record.artifact.manifest.contents
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
        row = files.get("row.json", {})
        if not RUN_KEY.fullmatch(str(row.get("run_key"))):
            raise UserError(
                f"--rebuild={str(folder)!r}: run_key={row.get('run_key')!r} is no name of a run; "
                "valid: the wandb folder of a store"
            )
        directory = store.run(row["run_key"])
        missing = directory.row() is None
        if missing:
            directory.describe(files.get("spec.json", {}))
            directory.commit(row)
        restored.append((row["run_key"], missing))
    return restored


@command
def main(argv: Sequence[str] | None = None) -> int:
    """List, upload or rebuild; return the exit code."""
    parser = command_parser(
        "wandb", __doc__, "--dry", "--store results", "--rebuild old/wandb --store results"
    )
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the store of runs")
    parser.add_argument("--dry", action="store_true", help="list what would be uploaded")
    parser.add_argument(
        "--rebuild", type=Path, help="a wandb folder with rows to commit to the store"
    )
    options = parser.parse_args(argv)
    if options.rebuild is None:
        existing_store(options.store)
        if not options.dry:
            return send(options.store)
        print_lines(*listing(options.store))
        return 0
    if not options.rebuild.is_dir():
        raise UserError(f"--rebuild={str(options.rebuild)!r} is not a folder; valid: <store>/wandb")
    done = rebuild(options.rebuild, Store(options.store))
    for key, missing in done:
        print(f"{key}: {'rebuilt' if missing else 'is there'}")
    print(f"{sum(missing for _, missing in done)} of {len(done)} rows rebuilt")
    return 0
