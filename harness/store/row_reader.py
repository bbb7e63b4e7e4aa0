"""Rows of a store for readers of thousands: chosen blocks, from the store's columns if still valid, else from files.

A run's `row.json` is read once: while its time, size and inode are unchanged, the columns
(harness/store/row_reader.py) hold its content. Changed rows are read again, missing ones are dropped, damaged ones
are read each time.
"""

from __future__ import annotations

import json
import os
import stat
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from espalier.harness.errors import FOREIGN, StoreLost
from espalier.harness.store import RunDir, Unreadable, access_error, folders_in, schema
from espalier.harness.store import row_blocks as blocks
from espalier.harness.store import row_shape as shape
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import Digests, read_bytes
from espalier.harness.store.row_blocks import (
    EXTRA,
    INNER,
    Row,
    RowBlock,
    RowSplitter,
    blocks_of,
    part_of,
    row_of,
)
from espalier.harness.store.row_shape import LARGEST

NAME = "index.columns"

#: Bytes of the digest in front: pages of Parquet have checksums, but their directory has none.
DIGEST = 16

#: Columns that are not blocks: the run, and the stamp of its file.
KEY = "key"
STAMP = ("mtime_ns", "size", "inode")

#: Key of the file's metadata for the digest of the code that made it.
CODE = b"espalier.code"

#: Errors of reading a damaged file, or one of another program.
DAMAGED = (*FOREIGN, pa.ArrowException)

#: A column with more distinct texts than this stores them in full, one per row.
DISTINCT = 8192

#: Number of rows parsed together.
BATCH = 4096

#: Type of a column of texts in memory; reading a file yields other types of the same content.
TEXTS = pa.dictionary(pa.int32(), pa.large_binary())

#: Value of a block that a row does not have.
ABSENT = object()


class FileStamp(NamedTuple):
    """Identity of a file's content when it was read; a file with another stamp has changed."""

    mtime_ns: int
    size: int
    inode: int


class ColumnBuilder:
    """Columns built from rows that are to be written."""

    def __init__(self) -> None:
        """Start without rows."""
        self.keys: list[str] = []
        self._stamps = tuple(array("q") for _ in STAMP)
        self._blocks: dict[str, tuple[dict[str, int], array[int]]] = {}

    def add(self, key: str, stamp: FileStamp, blocks: Iterable[RowBlock]) -> None:
        """Add a row."""
        index = len(self.keys)
        self.keys.append(key)
        for column, value in zip(self._stamps, stamp, strict=True):
            column.append(value)
        for name, text, _ in blocks:
            if name not in self._blocks:
                self._blocks[name] = {}, array("i")
            texts, codes = self._blocks[name]
            if len(codes) < index:
                codes.extend([-1] * (index - len(codes)))
            codes.append(texts.setdefault(text, len(texts)))

    def table(self) -> pa.Table:
        """Return the rows, in the order in which they were added."""
        size = len(self.keys)
        columns = {KEY: _texts(map(os.fsencode, self.keys))}
        columns |= {
            name: _numbers(pa.int64(), column)
            for name, column in zip(STAMP, self._stamps, strict=True)
        }
        for name, (texts, codes) in self._blocks.items():
            codes.extend([-1] * (size - len(codes)))
            present = np.frombuffer(codes, np.int32) >= 0
            columns[_column(name)] = pa.DictionaryArray.from_arrays(
                _numbers(pa.int32(), codes, present), _texts(map(str.encode, texts))
            )
        return pa.Table.from_arrays(list(columns.values()), names=list(columns))


class Columns:
    """The column file of a store, reduced to some blocks.

    Attributes:
        places: by run key, its line.
        stamps: of each line, the stamp of the row's file.
    """

    def __init__(self, store: Path, block_names: Iterable[str]) -> None:
        """Read some blocks of all rows; a file that cannot be used has none."""
        self.places: dict[str, int] = {}
        self.stamps: list[FileStamp] = []
        try:
            content = memoryview(read_bytes(store / NAME))
            if content[:DIGEST] != _digest(content[DIGEST:]):
                return
            self._file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(content[DIGEST:])))
            if (self._file.schema_arrow.metadata or {}).get(CODE) != _code():
                return
            stored = set(self._file.schema_arrow.names)
            self._block_names = [name for name in block_names if _column(name) in stored]
            wanted = [KEY, *STAMP, *map(_column, self._block_names)]
            # In this thread: a thread of pyarrow that frees these bytes while Python ends aborts the process.
            self._read = self._file.read(wanted, use_threads=False)
            stamps = (self._read[name].to_pylist() for name in STAMP)
            self.stamps = [FileStamp(*stamp) for stamp in zip(*stamps, strict=True)]
            keys = map(os.fsdecode, self._read[KEY].to_pylist())
            self.places = {key: place for place, key in enumerate(keys)}
        except DAMAGED:
            # The file is derived from the rows, so nothing is lost.
            self.places, self.stamps = {}, []

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        """Yield the named blocks of the rows at some lines."""
        if not places:
            return
        table = self._read
        if len(places) < len(self.stamps) or any(
            place != line for line, place in enumerate(places)
        ):
            table = table.take(_numbers(pa.int64(), array("q", places)))
        heads = [name for name in self._block_names if not name.startswith(INNER)]
        extras = [name for name in self._block_names if name.startswith(INNER)]
        inner = [name.removeprefix(INNER) for name in extras]
        columns = [_Decoded(table[_column(name)]) for name in (*heads, *extras)]
        for start in range(0, len(places), BATCH):
            size = min(BATCH, len(places) - start)
            lines = zip(*(column.batch(start, size) for column in columns), strict=True)
            for line in lines if columns else repeat((), size):
                row = _present(heads, line)
                row[EXTRA] = _present(inner, line[len(heads) :])
                yield row

    def kept_table(self, keep: Sequence[bool]) -> pa.Table | None:
        """Return the lines to keep with all their blocks; None if there are none, or the file is damaged there."""
        if not any(keep):
            return None
        mask = _numbers(pa.bool_(), np.packbits(keep, bitorder="little"), size=len(keep))
        try:
            return self._file.read(use_threads=False).replace_schema_metadata(None).filter(mask)
        except DAMAGED:
            return None


def write(store: Path, tables: Sequence[pa.Table]) -> None:
    """Replace the file by one with the rows of some tables.

    Raises:
        StoreLost: the disk is full or cannot be written.
    """
    tables_encoded = [
        pa.Table.from_arrays(list(map(_encoded, part.columns)), names=part.column_names)
        for part in tables
    ]
    table = pa.concat_tables(tables_encoded, promote_options="default").unify_dictionaries()
    order = pc.sort_indices(table[KEY].combine_chunks().dictionary_decode())
    columns = {
        name: _stored(table[name].combine_chunks().take(order), name) for name in table.column_names
    }
    table = pa.Table.from_arrays(list(columns.values()), names=list(columns))
    content = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({CODE: _code()}),
        content,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name, column in columns.items() if _repeats(column)],
        write_statistics=False,
    )
    data = content.getvalue().to_pybytes()
    durable.replace(store / NAME, _digest(data) + data)


class _Decoded:
    """A column with parsed texts: parsed once each if they repeat, else on demand."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._texts = column.combine_chunks()
        self._values = _parsed(self._texts.dictionary) if _repeats(self._texts) else None

    def batch(self, start: int, size: int) -> list[Any]:
        """Return the values of some rows."""
        texts = self._texts.slice(start, size)
        if self._values is not None:
            codes, values = texts.indices.to_pylist(), self._values
            return [ABSENT if code is None else values[code] for code in codes]
        parsed = iter(_parsed(texts.drop_null()))
        return [next(parsed) if valid else ABSENT for valid in texts.is_valid().to_pylist()]


def _parsed(texts: pa.Array) -> list[Any]:
    # Parsing one long text takes less time than many short ones.
    return list(json.loads(b"[%b]" % b",".join(texts.to_pylist())))


def _present(names: Sequence[str], line: Sequence[Any]) -> dict[str, Any]:
    return {name: value for name, value in zip(names, line, strict=False) if value is not ABSENT}


def _repeats(column: Any) -> bool:
    return bool(pa.types.is_dictionary(column.type))


def _encoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column if pa.types.is_int64(column.type) else column.cast(TEXTS)


def _stored(column: pa.Array, name: str) -> pa.Array:
    """Return a column as the file stores it: repeated texts once each, without unused ones."""
    if not _repeats(column):
        return column
    used = pc.unique(column.indices.drop_null())
    if name == KEY or len(used) > DISTINCT:
        return column.dictionary_decode()
    codes = pc.index_in(column.indices, used)
    return pa.DictionaryArray.from_arrays(codes, column.dictionary.take(used))


def _texts(texts: Iterable[bytes]) -> pa.Array:
    encoded = list(texts)
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_binary(), len(encoded), buffers)


def _numbers(
    kind: pa.DataType, values: Any, valid: Any = None, size: int | None = None
) -> pa.Array:
    # pa.array would do, but imports pandas to inspect its argument.
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [bits, pa.py_buffer(values)]
    return pa.Array.from_buffers(kind, len(values) if size is None else size, buffers)


def _column(block: str) -> str:
    """Return the column name of a block; the prefix keeps it apart from other columns."""
    return f"row.{block}"


def _digest(content: Any) -> bytes:
    return blake2b(content, digest_size=DIGEST).digest()


@cache
def _code() -> bytes:
    """Return a digest of the code that makes and reads the file."""
    files = [Path(str(module.__file__)) for module in (blocks, schema, shape)]
    return Digests().files([*files, Path(__file__)], Path(__file__).parent).encode()


#: The columns are rewritten when at least one row in this many is not in them; reading fewer takes less time.
STALE = 100


class ReadRun(NamedTuple):
    """The folder of a run and the blocks read from its row.

    Attributes:
        path: the folder.
        committed: when the row was committed, in seconds.
        row: the requested blocks, with the objects that rows share; None if there is no row, or it cannot be read.
        problem: why it cannot be read.
    """

    path: Path
    committed: float = 0.0
    row: Row | None = None
    problem: Unreadable | None = None


#: A function that yields the runs of a store with some blocks of their rows, as `walk` does.
Walk = Callable[[Path, Collection[str]], Iterable[ReadRun]]


def walk(
    store: Path, block_names: Collection[str], only: Collection[str] | None = None
) -> Iterator[ReadRun]:
    """Yield the runs of a store, ordered by key; with `only`, those of these keys.

    Args:
        store: its folder; one without runs yields nothing.
        block_names: blocks of the rows (harness/store/row_blocks.py).
        only: keys of runs.

    Cost: one stat per run, and some 20 us more if the columns hold the row, or 60 us to read a file.
    """
    runs = store / "runs"
    keys_present = set(folders_in(runs))
    if not keys_present:
        return
    columns, splitter = Columns(store, block_names), RowSplitter()
    keys = sorted(keys_present if only is None else keys_present.intersection(only))
    keep = [key in keys_present for key in columns.places]
    placed: list[tuple[str, float | None, int | None]] = []
    errors: dict[str, OSError] = {}
    for key in keys:
        place = columns.places.get(key)
        try:
            state = os.stat(f"{runs}/{key}/row.json")
        except (FileNotFoundError, NotADirectoryError):
            state = None
        except OSError as error:  # of another user, or a link to itself
            errors[key] = error
            state = None
        committed = None if state is None else state.st_mtime
        if place is not None and (state is None or columns.stamps[place] != _stamp(state)):
            keep[place] = False
            place = None
        placed.append((key, committed, place))
    copied = columns.rows([place for _, _, place in placed if place is not None])
    fresh = ColumnBuilder() if os.access(store, os.W_OK) else None
    for key, committed, place in placed:
        if place is not None:
            yield ReadRun(runs / key, committed or 0.0, next(copied))
        elif key in errors:
            yield ReadRun(
                runs / key, _changed(runs / key), problem=access_error(runs / key, errors[key])
            )
        elif committed is not None:
            yield _read(runs / key, committed, block_names, splitter, fresh)
        else:
            yield ReadRun(runs / key)
    if fresh is None:
        return
    changed = len(fresh.keys) + keep.count(False)
    if changed and changed * STALE >= len(keep):
        former = columns.kept_table(keep)
        # Without the columns the next reader takes longer but reads the same.
        with suppress(StoreLost):
            write(store, [fresh.table()] if former is None else [former, fresh.table()])


def walk_once(block_names: Collection[str]) -> Walk:
    """Return a `walk` for several readers: a store is read once, with the first one's blocks and these."""
    read: dict[Path, list[ReadRun]] = {}

    def runs(store: Path, first_names: Collection[str]) -> list[ReadRun]:
        if store not in read:
            read[store] = list(walk(store, sorted({*first_names, *block_names})))
        return read[store]

    return runs


def _read(
    path: Path,
    committed: float,
    block_names: Collection[str],
    splitter: RowSplitter,
    fresh: ColumnBuilder | None,
) -> ReadRun:
    """Return a run from its file, and add its blocks to `fresh`."""
    try:
        stamp, raw = _content(path / "row.json")
        blocks = splitter.split_row(raw, path.name)
        if blocks is not None:
            part = row_of((name, value) for name, _, value in blocks if name in block_names)
        else:
            row = RunDir(path).row()
            if row is None:
                return ReadRun(path)
            blocks, part = blocks_of(row), part_of(row, block_names)
    except Unreadable as error:
        return ReadRun(path, committed, problem=error)
    if fresh is not None and blocks is not None:
        fresh.add(path.name, stamp, blocks)
    return ReadRun(path, committed, part)


def _changed(folder: Path) -> float:
    """Return when a folder changed last; 0 if that cannot be read."""
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _content(path: Path) -> tuple[FileStamp, bytes]:
    """Return the stamp of a file before it is read, and its bytes; no bytes if it is too large or no file."""
    try:
        # Reading a pipe would never end.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return FileStamp(0, 0, 0), b""
    try:
        state = os.fstat(file)
        with suppress(OSError):
            if stat.S_ISREG(state.st_mode) and state.st_size <= LARGEST:
                return _stamp(state), os.read(file, state.st_size)
        return _stamp(state), b""
    finally:
        os.close(file)


def _stamp(state: os.stat_result) -> FileStamp:
    return FileStamp(state.st_mtime_ns, state.st_size, state.st_ino)
