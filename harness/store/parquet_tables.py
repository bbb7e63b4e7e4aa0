"""Rows and scores of a store as two Parquet files, small enough to be tracked in git.

`rows.parquet` has for each run `run_key`, `committed` (seconds since 1970) and `row`, the JSON of `row.json`.
`samples.parquet` has for each run, sample and metric `run_key`, `task`, `doc_id`, `metric`, `score` (the sample's
contribution) and `unit` (the first document of its unit of statistics). Answers, media and records are not included.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from espalier.harness.errors import FOREIGN, StoreLost, UserError, first_words, foreign, tell_once
from espalier.harness.paths import ROOT
from espalier.harness.store import RunDir, Store, schema
from espalier.harness.store import row_shape as shape
from espalier.harness.store.files import durable, journal
from espalier.harness.store.files.digests import Digests, read_bytes, refuse_constant
from espalier.harness.store.files.folder_checks import check_folder
from espalier.harness.store.row_shape import check_shape
from espalier.harness.store.schema import upgraded

ROWS, SAMPLES = "rows.parquet", "samples.parquet"

#: Columns of the two files.
ROW_TYPES = pa.schema([("run_key", pa.string()), ("committed", pa.float64()), ("row", pa.string())])
SAMPLE_TYPES = pa.schema(
    [
        ("run_key", pa.string()),
        ("task", pa.string()),
        ("doc_id", pa.int64()),
        ("metric", pa.string()),
        ("score", pa.float64()),
        ("unit", pa.int64()),
    ]
)

Row = Mapping[str, Any]
JournalEntry = Mapping[str, Any]


def is_table(folder: Path) -> bool:
    """Return whether a folder holds rows as tables."""
    return (folder / ROWS).is_file()


def read_tables(folder: Path) -> list[tuple[Row, Sequence[JournalEntry]]]:
    """Return rows, the oldest first, each with scoring entries in the form of a journal.

    Raises:
        UserError: a file is missing, damaged or of other columns, a row is of another version, or a run occurs twice.
    """
    rows = read_rows(folder)
    entries: dict[str, dict[tuple[str, int], dict[str, Any]]] = {row["run_key"]: {} for row in rows}
    table = read_samples(folder).to_pydict()
    for key, task, doc_id, metric, score, unit in zip(*table.values(), strict=True):
        if key not in entries:
            raise UserError(
                f"{folder / SAMPLES}: run {key} is not in {ROWS}; valid: files written together"
            )
        entry = entries[key].setdefault(
            (task, doc_id), {"task": task, "doc_id": doc_id, "scores": {}, "units": {}}
        )
        entry["scores"][metric] = score
        if unit != doc_id:
            entry["units"][metric] = unit
    return [(row, list(entries[row["run_key"]].values())) for row in rows]


def read_rows(folder: Path) -> list[Row]:
    """Return the rows alone; raises UserError as `read_tables`."""
    return [row for _, row in dated_rows(folder)]


def dated_rows(folder: Path) -> list[tuple[float, Row]]:
    """Return when each row was committed, in seconds, and the row; raises UserError as `read_tables`."""
    table = _read(folder / ROWS, ROW_TYPES).sort_by("committed").to_pydict()
    keys: list[str] = table["run_key"]
    duplicates = [key for key, count in Counter(keys).items() if count > 1]
    if duplicates:
        raise UserError(
            f"{folder / ROWS}: run {duplicates[0]} is there twice; valid: each run once"
        )
    rows: list[Row] = []
    for key, text in zip(keys, table["row"], strict=True):
        try:
            row = upgraded(json.loads(text, parse_constant=refuse_constant))
            check_shape(row)
            rows.append(row)
        except FOREIGN as error:
            raise UserError(f"{folder / ROWS}: run {key} has {first_words(error)}") from error
    return list(zip(table["committed"], rows, strict=True))


def read_samples(folder: Path) -> pa.Table:
    """Return the scores of samples; raises UserError as `read_tables`."""
    return _read(folder / SAMPLES, SAMPLE_TYPES)


def _read(path: Path, types: pa.Schema) -> pa.Table:
    if not path.is_file():
        raise UserError(f"{path} is missing; valid: {ROWS} and {SAMPLES}, written together")
    with foreign(f"{path} is damaged", "a whole file", (pa.ArrowException,)):
        table = pq.read_table(path)
        if table.column_names != types.names:
            names = ", ".join(types.names)
            raise UserError(f"{path} has columns {', '.join(table.column_names)}; valid: {names}")
        return table.cast(types)


NAME = "index.exported"

#: Compression level: level 19 makes the tables a tenth smaller, and takes twenty times as long.
LEVEL = 9

#: Errors of reading a file of another program.
DAMAGED = (*FOREIGN, pa.ArrowException)


class ExportResult(NamedTuple):
    """The result of an export: rows and bytes of the tables, and the number of runs that were read."""

    rows: int
    size: int
    read: int


class RunLines(NamedTuple):
    """The lines of one run.

    Attributes:
        key: of the run.
        mark: a digest of the stamps of its files before they were read.
        row: its line in the table of rows.
        scores: its lines in the table of samples.
    """

    key: str
    mark: str
    row: pa.Table
    scores: pa.Table


class FormerExport(NamedTuple):
    """The newest export, if its files are unchanged: digests of its files, and runs in their order."""

    files: Mapping[str, str]
    parts: Mapping[str, RunLines]


def write_tables(store: Path, folder: Path) -> ExportResult:
    """Write the finished runs of a store as tables; the files are identical to the byte for any former export.

    Damaged lines of a journal are reported when the run is read, not when its lines are copied.

    Raises:
        UserError: the store has no finished run, or a journal cannot be read.
        StoreLost: the disk is full or cannot be written.

    Cost: three system calls for an unchanged run; a table with changes is rewritten completely.
    """
    check_folder("export", folder)
    former, dated, read = _former(store, folder), [], 0
    for run in Store(store).folders():
        try:
            committed, mark = _stamped(run)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            tell_once(f"passed over: run {run.path}: {first_words(error)}")
            continue
        part = former.parts.get(run.path.name)
        if part is None or part.mark != mark:
            part, read = _lines_of(run, committed, mark), read + 1
        if part is not None:
            dated.append((committed, part))
    if not dated:
        raise UserError(f"store={str(store)!r} holds no finished runs; valid: a store with rows")
    parts = [part for _, part in sorted(dated, key=lambda pair: (pair[0], pair[1].key))]
    if parts != list(former.parts.values()):
        _write(store, folder, former, parts)
    size = sum((folder / name).stat().st_size for name in (ROWS, SAMPLES))
    return ExportResult(len(parts), size, read)


def _stamped(run: RunDir) -> tuple[float, str]:
    """Return when a run was committed, in seconds, and a digest of the stamps of its files."""
    row = os.stat(run.path / "row.json")
    states = [("row.json", row), *((path.name, os.stat(path)) for path in run.journal.files())]
    stamps = [(name, state.st_mtime_ns, state.st_size, state.st_ino) for name, state in states]
    return row.st_mtime, _digest(json.dumps(stamps).encode())


def _lines_of(run: RunDir, committed: float, mark: str) -> RunLines | None:
    """Return the lines of a run from its files; None if it has no readable row."""
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
    return RunLines(key, mark, pa.Table.from_pylist([line], schema=ROW_TYPES), lines)


def _write(store: Path, folder: Path, former: FormerExport, parts: list[RunLines]) -> None:
    """Write the files that differ from the former ones, and then the index."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    # Each file appears at once. A reader between the two finds scores of runs without a row and reports that.
    for name, lines in (
        (SAMPLES, [part.scores for part in parts]),
        (ROWS, [part.row for part in parts]),
    ):
        content = _encoded(pa.concat_tables(lines))
        files[name] = _digest(content)
        if former.files.get(name) != files[name]:
            durable.replace(folder / name, content)
    # Last: if killed before this, the next export finds other digests. A read-only store is read each time.
    if os.access(store, os.W_OK):
        runs = [(part.key, part.mark, part.scores.num_rows) for part in parts]
        index = json.dumps({"code": _code(), "files": files, "runs": runs}).encode()
        with suppress(StoreLost):
            durable.replace(store / NAME, f"{_digest(index)}\n".encode() + index)


def _encoded(table: pa.Table) -> bytes:
    content = pa.BufferOutputStream()
    # In one piece: page boundaries must not depend on which runs were read.
    pq.write_table(table.combine_chunks(), content, compression="zstd", compression_level=LEVEL)
    return bytes(content.getvalue().to_pybytes())


def _former(store: Path, folder: Path) -> FormerExport:
    try:
        digest, _, text = read_bytes(store / NAME).partition(b"\n")
        content = {name: read_bytes(folder / name) for name in (ROWS, SAMPLES)}
        if digest.decode() != _digest(text):
            return FormerExport({}, {})
        index: dict[str, Any] = json.loads(text)
    except DAMAGED:
        return FormerExport({}, {})
    files = {name: _digest(data) for name, data in content.items()}
    # Compare the code first: another version may have written any layout.
    if index.get("code") != _code() or index["files"] != files:
        return FormerExport({}, {})
    try:
        # In this thread: a thread of pyarrow that frees these bytes while Python ends aborts the process.
        rows, scores = (
            pq.ParquetFile(pa.BufferReader(content[name])).read(use_threads=False)
            for name in (ROWS, SAMPLES)
        )
        return FormerExport(files, {part.key: part for part in _parts(index["runs"], rows, scores)})
    except DAMAGED:
        return FormerExport({}, {})


def _parts(runs: list[list[Any]], rows: pa.Table, scores: pa.Table) -> Iterator[RunLines]:
    """Yield the lines of each run from the tables, which hold them in this order."""
    start = 0
    for place, (key, mark, count) in enumerate(runs):
        yield RunLines(key, mark, rows.slice(place, 1), scores.slice(start, count))
        start += count


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


@cache
def _code() -> str:
    """Return a digest of the code that makes tables from rows and journals, and of the encoding library."""
    files = [Path(str(module.__file__)) for module in (journal, schema, shape)]
    return f"{Digests().files([*files, Path(__file__)], ROOT)} pyarrow {pa.__version__}"
