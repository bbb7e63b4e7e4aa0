"""`<store>/index.columns`: the rows of a store again, in columns, beside time, size and inode of each `row.json`.

A column is a block of the rows (harness/store/row_blocks.py), its texts once each where they repeat. The file is a
digest
and what it is of, in Parquet. It is made of the rows and never the other way: damaged, of other code or gone, it is
made anew. It appears by rename.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from espalier.harness.errors import FOREIGN
from espalier.harness.store import row_blocks as blocks
from espalier.harness.store import row_shape as shape
from espalier.harness.store import schema
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.files.untrusted_json import read_bytes
from espalier.harness.store.row_blocks import EXTRA, INNER, Block, Row

NAME = "index.columns"

#: Bytes of the digest in front: pages of Parquet have checksums, and what says where they lie has none.
DIGEST = 16

#: Columns that are no blocks: the run, and what its file had.
KEY = "key"
MARKS = ("mtime_ns", "size", "inode")

#: In the file's metadata: what made it.
CODE = b"espalier.code"

#: What reading a damaged file, or one of another program, ends in.
DAMAGED = (*FOREIGN, pa.ArrowException)

#: A column of more texts than these has them in full, a row each.
DISTINCT = 8192

#: Rows whose texts are parsed together.
BATCH = 4096

#: How a column of texts is worked with; reading a file gives other types of the same.
TEXTS = pa.dictionary(pa.int32(), pa.large_binary())

#: Stands for a block that a row has not.
ABSENT = object()


class Mark(NamedTuple):
    """What a file had when it was read; one that has others holds something else."""

    mtime_ns: int
    size: int
    inode: int


class Gathered:
    """Rows that are to be written, as columns."""

    def __init__(self) -> None:
        """Start with none."""
        self.keys: list[str] = []
        self._marks = tuple(array("q") for _ in MARKS)
        self._blocks: dict[str, tuple[dict[str, int], array[int]]] = {}

    def add(self, key: str, mark: Mark, found: Iterable[Block]) -> None:
        """Add a row."""
        place = len(self.keys)
        self.keys.append(key)
        for column, value in zip(self._marks, mark, strict=True):
            column.append(value)
        for name, text, _ in found:
            if name not in self._blocks:
                self._blocks[name] = {}, array("i")
            texts, codes = self._blocks[name]
            if len(codes) < place:
                codes.extend([-1] * (place - len(codes)))
            codes.append(texts.setdefault(text, len(texts)))

    def table(self) -> pa.Table:
        """Return the rows, in the order in which they came."""
        size = len(self.keys)
        columns = {KEY: _texts(map(os.fsencode, self.keys))}
        columns |= {
            name: _numbers(pa.int64(), column)
            for name, column in zip(MARKS, self._marks, strict=True)
        }
        for name, (texts, codes) in self._blocks.items():
            codes.extend([-1] * (size - len(codes)))
            there = np.frombuffer(codes, np.int32) >= 0
            columns[_column(name)] = pa.DictionaryArray.from_arrays(
                _numbers(pa.int32(), codes, there), _texts(map(str.encode, texts))
            )
        return pa.Table.from_arrays(list(columns.values()), names=list(columns))


class Columns:
    """The file of a store, as far as a reader asks for it.

    Attributes:
        places: of each run that it has, the line.
        marks: of each line.
    """

    def __init__(self, store: Path, asked: Iterable[str]) -> None:
        """Read some blocks of all rows; a file that cannot be used has none."""
        self.places: dict[str, int] = {}
        self.marks: list[Mark] = []
        try:
            content = memoryview(read_bytes(store / NAME))
            if content[:DIGEST] != _digest(content[DIGEST:]):
                return
            self._file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(content[DIGEST:])))
            if (self._file.schema_arrow.metadata or {}).get(CODE) != _code():
                return
            there = set(self._file.schema_arrow.names)
            self._asked = [name for name in asked if _column(name) in there]
            wanted = [KEY, *MARKS, *map(_column, self._asked)]
            # In this thread: one of pyarrow's that lets go of these bytes while Python ends aborts the process.
            self._read = self._file.read(wanted, use_threads=False)
            marks = (self._read[name].to_pylist() for name in MARKS)
            self.marks = [Mark(*mark) for mark in zip(*marks, strict=True)]
            keys = map(os.fsdecode, self._read[KEY].to_pylist())
            self.places = {key: place for place, key in enumerate(keys)}
        except DAMAGED:
            # It is made of the rows, so that nothing is lost with it.
            self.places, self.marks = {}, []

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        """Yield the asked blocks of the rows of some lines."""
        if not places:
            return
        table = self._read
        if len(places) < len(self.marks) or any(one != line for line, one in enumerate(places)):
            table = table.take(_numbers(pa.int64(), array("q", places)))
        heads = [name for name in self._asked if not name.startswith(INNER)]
        extras = [name for name in self._asked if name.startswith(INNER)]
        inner = [name.removeprefix(INNER) for name in extras]
        columns = [_Decoded(table[_column(name)]) for name in (*heads, *extras)]
        for start in range(0, len(places), BATCH):
            size = min(BATCH, len(places) - start)
            lines = zip(*(column.batch(start, size) for column in columns), strict=True)
            for line in lines if columns else repeat((), size):
                row = _present(heads, line)
                row[EXTRA] = _present(inner, line[len(heads) :])
                yield row

    def whole(self, stays: Sequence[bool]) -> pa.Table | None:
        """Return the lines that stay with all their blocks; None if there are none, or the file is damaged there."""
        if not any(stays):
            return None
        mask = _numbers(pa.bool_(), np.packbits(stays, bitorder="little"), size=len(stays))
        try:
            return self._file.read(use_threads=False).replace_schema_metadata(None).filter(mask)
        except DAMAGED:
            return None


def write(store: Path, tables: Sequence[pa.Table]) -> None:
    """Write rows in the place of those that the file has.

    Raises:
        StoreLost: the disk is full or cannot be written.
    """
    alike = [
        pa.Table.from_arrays(list(map(_encoded, one.columns)), names=one.column_names)
        for one in tables
    ]
    table = pa.concat_tables(alike, promote_options="default").unify_dictionaries()
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
        use_dictionary=[name for name, one in columns.items() if _repeats(one)],
        write_statistics=False,
    )
    found = content.getvalue().to_pybytes()
    durable.replace(store / NAME, _digest(found) + found)


class _Decoded:
    """A column whose texts are parsed: once each where they repeat, else as they are asked for."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._texts = column.combine_chunks()
        self._values = _parsed(self._texts.dictionary) if _repeats(self._texts) else None

    def batch(self, start: int, size: int) -> list[Any]:
        """Return the values of some rows."""
        texts = self._texts.slice(start, size)
        if self._values is not None:
            codes, values = texts.indices.to_pylist(), self._values
            return [ABSENT if code is None else values[code] for code in codes]
        found = iter(_parsed(texts.drop_null()))
        return [next(found) if there else ABSENT for there in texts.is_valid().to_pylist()]


def _parsed(texts: pa.Array) -> list[Any]:
    # One long text takes less time than many short ones.
    return list(json.loads(b"[%b]" % b",".join(texts.to_pylist())))


def _present(names: Sequence[str], line: Sequence[Any]) -> dict[str, Any]:
    return {name: value for name, value in zip(names, line, strict=False) if value is not ABSENT}


def _repeats(column: Any) -> bool:
    return bool(pa.types.is_dictionary(column.type))


def _encoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column if pa.types.is_int64(column.type) else column.cast(TEXTS)


def _stored(column: pa.Array, name: str) -> pa.Array:
    """Return a column as the file has it: texts that repeat once each, and none that no row has."""
    if not _repeats(column):
        return column
    used = pc.unique(column.indices.drop_null())
    if name == KEY or len(used) > DISTINCT:
        return column.dictionary_decode()
    codes = pc.index_in(column.indices, used)
    return pa.DictionaryArray.from_arrays(codes, column.dictionary.take(used))


def _texts(texts: Iterable[bytes]) -> pa.Array:
    found = list(texts)
    ends = np.cumsum([0, *map(len, found)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(found))]
    return pa.Array.from_buffers(pa.large_binary(), len(found), buffers)


def _numbers(
    kind: pa.DataType, values: Any, there: Any = None, size: int | None = None
) -> pa.Array:
    # pa.array would do, but imports pandas to look at what it is given.
    bits = None if there is None else pa.py_buffer(np.packbits(there, bitorder="little"))
    buffers = [bits, pa.py_buffer(values)]
    return pa.Array.from_buffers(kind, len(values) if size is None else size, buffers)


def _column(block: str) -> str:
    """Return the column of a block; a block may be called as another column is."""
    return f"row.{block}"


def _digest(content: Any) -> bytes:
    return blake2b(content, digest_size=DIGEST).digest()


@cache
def _code() -> bytes:
    """Return a digest of the code that makes and judges what is in the file."""
    files = [Path(str(one.__file__)) for one in (blocks, schema, shape)]
    return Digests().files([*files, Path(__file__)], Path(__file__).parent).encode()
