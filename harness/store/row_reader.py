"""Rows of a store for readers of thousands: chosen blocks, from the store's columns if still valid, else from files.

A run's `row.json` is read once: while its time, size and inode are unchanged, the columns
(harness/store/column_index.py) hold its content. Changed rows are read again, missing ones are dropped, damaged ones
are read each time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from espalier.harness.errors import StoreLost
from espalier.harness.store import RunDir, Unreadable, access_error, folders_in
from espalier.harness.store.column_index import ColumnBuilder, Columns, FileStamp, write
from espalier.harness.store.row_blocks import Row, RowSplitter, blocks_of, part_of, row_of
from espalier.harness.store.row_shape import LARGEST

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
