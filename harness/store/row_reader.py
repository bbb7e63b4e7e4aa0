"""Rows of a store for readers of thousands: blocks of them, out of its columns where these still hold, else its files.

A run's `row.json` is read once: while its time, size and inode stay, the columns (harness/store/column_index.py) have
what
it says. One that has changed is read again, one that is gone is forgotten, one that is damaged is read each time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from espalier.harness.errors import StoreLost
from espalier.harness.store import RunDir, Unreadable, folders_in, unopened
from espalier.harness.store.column_index import Columns, Gathered, Mark, write
from espalier.harness.store.row_blocks import Cutter, Row, blocks_of, part_of, row_of

#: The columns are written anew when one row in so many is not in them: reading the others takes less time.
STALE = 100


class Found(NamedTuple):
    """The folder of a run, as it is found.

    Attributes:
        path: it.
        committed: when the row was, in seconds.
        row: the asked blocks of it, with the objects that rows share; None where there is none, or it cannot be read.
        problem: why it cannot.
    """

    path: Path
    committed: float = 0.0
    row: Row | None = None
    problem: Unreadable | None = None


def walk(
    store: Path, asked: Collection[str], only: Collection[str] | None = None
) -> Iterator[Found]:
    """Yield the runs of a store, ordered by key; with `only`, those of these keys.

    Args:
        store: its folder; one that has no runs yields nothing.
        asked: blocks of the rows (harness/store/row_blocks.py).
        only: keys of runs.

    Cost: one stat a run, and where the columns hold some 20 us more; a file that is read 60 us.
    """
    runs = store / "runs"
    there = set(folders_in(runs))
    if not there:
        return
    columns, cutter = Columns(store, asked), Cutter()
    looked = sorted(there if only is None else there.intersection(only))
    stays = [key in there for key in columns.places]
    found: list[tuple[str, float | None, int | None]] = []
    closed: dict[str, OSError] = {}
    for key in looked:
        place = columns.places.get(key)
        try:
            state = os.stat(f"{runs}/{key}/row.json")
        except (FileNotFoundError, NotADirectoryError):
            state = None
        except OSError as error:  # of another user, or a link to itself
            closed[key] = error
            state = None
        committed = None if state is None else state.st_mtime
        if place is not None and (state is None or columns.marks[place] != _mark(state)):
            stays[place] = False
            place = None
        found.append((key, committed, place))
    copied = columns.rows([place for _, _, place in found if place is not None])
    fresh = Gathered() if os.access(store, os.W_OK) else None
    for key, committed, place in found:
        if place is not None:
            yield Found(runs / key, committed or 0.0, next(copied))
        elif key in closed:
            yield Found(runs / key, _changed(runs / key), problem=unopened(runs / key, closed[key]))
        elif committed is not None:
            yield _read(runs / key, committed, asked, cutter, fresh)
        else:
            yield Found(runs / key)
    if fresh is None:
        return
    changed = len(fresh.keys) + stays.count(False)
    if changed and changed * STALE >= len(stays):
        kept = columns.whole(stays)
        # Without them the next reader takes longer, and reads the same.
        with suppress(StoreLost):
            write(store, [fresh.table()] if kept is None else [kept, fresh.table()])


def _read(
    path: Path, committed: float, asked: Collection[str], cutter: Cutter, fresh: Gathered | None
) -> Found:
    """Return a run as its file has it, and gather its blocks."""
    try:
        mark, raw = _content(path / "row.json")
        blocks = cutter.cut(raw, path.name)
        if blocks is not None:
            part = row_of((name, value) for name, _, value in blocks if name in asked)
        else:
            row = RunDir(path).row()
            if row is None:
                return Found(path)
            blocks, part = blocks_of(row), part_of(row, asked)
    except Unreadable as error:
        return Found(path, committed, problem=error)
    if fresh is not None and blocks is not None:
        fresh.add(path.name, mark, blocks)
    return Found(path, committed, part)


def _changed(folder: Path) -> float:
    """Return when a folder changed last; 0 where even that is not to be known."""
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _content(path: Path) -> tuple[Mark, bytes]:
    """Return what a file had before it was read, and its bytes; none of what is no file or cannot be read."""
    try:
        # A pipe would never end.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return Mark(0, 0, 0), b""
    try:
        state = os.fstat(file)
        with suppress(OSError):
            if stat.S_ISREG(state.st_mode):
                return _mark(state), os.read(file, state.st_size)
        return _mark(state), b""
    finally:
        os.close(file)


def _mark(state: os.stat_result) -> Mark:
    return Mark(state.st_mtime_ns, state.st_size, state.st_ino)
