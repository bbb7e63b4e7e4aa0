"""Writes the rows and scores of a store as tables (harness/store/parquet_tables.py), and reads only what changed since.

`<store>/index.exported` says what the newest export is of: the digests of its two files and, of each run in them, what
`row.json` and the files of the journal had (time, size, inode). As long as they have the same, the run's lines are
copied out of the tables. Tables that are gone, damaged, older or of another writer have other digests; then every run
is read, as it is where this file is gone, damaged or of other code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from espalier.harness.errors import FOREIGN, StoreLost, UserError, first_words, tell_once
from espalier.harness.paths import ROOT
from espalier.harness.store import RunDir, Store, schema
from espalier.harness.store import parquet_tables as tables
from espalier.harness.store import row_shape as shape
from espalier.harness.store.files import durable, journal
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.files.folder_checks import check_folder
from espalier.harness.store.files.untrusted_json import read_bytes
from espalier.harness.store.parquet_tables import ROW_TYPES, ROWS, SAMPLE_TYPES, SAMPLES

NAME = "index.exported"

#: How hard the tables are compressed: level 19 makes them a tenth smaller, and takes twenty times as long.
LEVEL = 9

#: What reading a file of another program ends in.
DAMAGED = (*FOREIGN, pa.ArrowException)


class Written(NamedTuple):
    """What an export did: rows and bytes of the tables, and how many runs it read for them."""

    rows: int
    size: int
    read: int


class Part(NamedTuple):
    """The lines of one run.

    Attributes:
        key: of the run.
        mark: a digest of what its files had before they were read.
        row: its line in the table of rows.
        scores: its lines in the table of samples.
    """

    key: str
    mark: str
    row: pa.Table
    scores: pa.Table


class Former(NamedTuple):
    """What the newest export has left, if it is there unchanged: digests of its files, and runs in their order."""

    files: Mapping[str, str]
    parts: Mapping[str, Part]


def write_tables(store: Path, folder: Path) -> Written:
    """Write the finished runs of a store as tables; the files are the same to the byte whatever was there before.

    What damaged lines a journal has is told when the run is read, not when its lines are copied.

    Raises:
        UserError: the store has no finished run, or a journal cannot be read.
        StoreLost: the disk is full or cannot be written.

    Cost: for a run that has not changed three system calls; a table in which something changed is written whole.
    """
    check_folder("export", folder)
    former, found, read = _former(store, folder), [], 0
    for run in Store(store).folders():
        try:
            committed, mark = _marked(run)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            tell_once(f"passed over: run {run.path}: {first_words(error)}")
            continue
        part = former.parts.get(run.path.name)
        if part is None or part.mark != mark:
            part, read = _read(run, committed, mark), read + 1
        if part is not None:
            found.append((committed, part))
    if not found:
        raise UserError(f"store={str(store)!r} holds no finished runs; valid: a store with rows")
    parts = [part for _, part in sorted(found, key=lambda one: (one[0], one[1].key))]
    if parts != list(former.parts.values()):
        _write(store, folder, former, parts)
    size = sum((folder / name).stat().st_size for name in (ROWS, SAMPLES))
    return Written(len(parts), size, read)


def _marked(run: RunDir) -> tuple[float, str]:
    """Return when a run was committed, in seconds, and a digest of what its files have."""
    row = os.stat(run.path / "row.json")
    states = [("row.json", row), *((path.name, os.stat(path)) for path in run.journal.files())]
    had = [(name, one.st_mtime_ns, one.st_size, one.st_ino) for name, one in states]
    return row.st_mtime, _digest(json.dumps(had).encode())


def _read(run: RunDir, committed: float, mark: str) -> Part | None:
    """Return the lines of a run as its files have them; None if it has no row that can be read."""
    row = run.readable_row()
    if row is None:
        return None
    key = row["run_key"]
    line = {"run_key": key, "committed": committed, "row": json.dumps(row)}
    try:
        scores = [
            {
                **{"run_key": key, "task": entry["task"], "doc_id": entry["doc_id"]},
                **{"metric": metric, "score": float(score)},
                "unit": entry.get("units", {}).get(metric, entry["doc_id"]),
            }
            for entry in run.journal.entries()
            for metric, score in entry.get("scores", {}).items()
        ]
        lines = pa.Table.from_pylist(scores, schema=SAMPLE_TYPES)
    except FOREIGN as error:
        tell_once(f"passed over: run {run.path}: its journal is damaged ({first_words(error)})")
        return None
    return Part(key, mark, pa.Table.from_pylist([line], schema=ROW_TYPES), lines)


def _write(store: Path, folder: Path, former: Former, parts: list[Part]) -> None:
    """Write what differs from the former files, and then what they are of."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    # Each file appears whole. Whoever reads between the two finds scores of runs without a row, and is told so.
    for name, lines in (
        (SAMPLES, [part.scores for part in parts]),
        (ROWS, [part.row for part in parts]),
    ):
        content = _encoded(pa.concat_tables(lines))
        files[name] = _digest(content)
        if former.files.get(name) != files[name]:
            durable.replace(folder / name, content)
    # Last: killed before this, the next export finds other digests. A store that cannot be written is read each time.
    if os.access(store, os.W_OK):
        runs = [(part.key, part.mark, part.scores.num_rows) for part in parts]
        told = json.dumps({"code": _code(), "files": files, "runs": runs}).encode()
        with suppress(StoreLost):
            durable.replace(store / NAME, f"{_digest(told)}\n".encode() + told)


def _encoded(table: pa.Table) -> bytes:
    content = pa.BufferOutputStream()
    # In one piece: where pages end would otherwise tell which runs were read.
    pq.write_table(table.combine_chunks(), content, compression="zstd", compression_level=LEVEL)
    return bytes(content.getvalue().to_pybytes())


def _former(store: Path, folder: Path) -> Former:
    try:
        digest, _, told = read_bytes(store / NAME).partition(b"\n")
        content = {name: read_bytes(folder / name) for name in (ROWS, SAMPLES)}
        if digest.decode() != _digest(told):
            return Former({}, {})
        index: dict[str, Any] = json.loads(told)
    except DAMAGED:
        return Former({}, {})
    files = {name: _digest(found) for name, found in content.items()}
    # The code comes first: that of another version may have written anything.
    if index.get("code") != _code() or index["files"] != files:
        return Former({}, {})
    try:
        # In this thread: one of pyarrow's that lets go of these bytes while Python ends aborts the process.
        rows, scores = (
            pq.ParquetFile(pa.BufferReader(content[name])).read(use_threads=False)
            for name in (ROWS, SAMPLES)
        )
        return Former(files, {part.key: part for part in _parts(index["runs"], rows, scores)})
    except DAMAGED:
        return Former({}, {})


def _parts(runs: list[list[Any]], rows: pa.Table, scores: pa.Table) -> Iterator[Part]:
    """Yield the lines of each run out of the tables, which have them in this order."""
    start = 0
    for place, (key, mark, count) in enumerate(runs):
        yield Part(key, mark, rows.slice(place, 1), scores.slice(start, count))
        start += count


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


@cache
def _code() -> str:
    """Return a digest of the code that makes tables of rows and journals, and of the library that encodes them."""
    files = [Path(str(one.__file__)) for one in (journal, schema, shape, tables)]
    return f"{Digests().files([*files, Path(__file__)], ROOT)} pyarrow {pa.__version__}"
