"""A row split into blocks: the entries of its top level and those of `extra`, each with the text of its JSON.

Rows share most of their blocks, above all settings and environment. A file is split at its lines, and a block that
another row had is not parsed again. The result is either the row that `RunDir.row` returns, or None.
"""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from espalier.harness.store.files.digests import refuse_constant
from espalier.harness.store.row_shape import check_extra, check_shape
from espalier.harness.store.schema import SCHEMA

Row = Mapping[str, Any]

#: The entry of a row with nested blocks, such as `extra.label`.
EXTRA = "extra"
INNER = f"{EXTRA}."

#: Parses one value; a row has tens of them. Takes a third of the time of json.loads on short texts.
_scan = json.scanner.make_scanner(json.JSONDecoder(parse_constant=refuse_constant))  # type: ignore[arg-type]

#: Maximum number of cached blocks of one level, and of cached objects of rows.
CACHE_SIZE = 8192


class RowBlock(NamedTuple):
    """One entry of a row; rows with the same text share the object of its value."""

    name: str
    text: str
    value: Any


class RowSplitter:
    """Splits the files of rows into blocks, with a cache of blocks."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._cache: dict[str, dict[str, RowBlock]] = {"": {}, INNER: {}}

    def split_row(self, raw: bytes, key: str) -> list[RowBlock] | None:
        """Return the blocks of a `row.json`, or None if it is not certainly a row of this version in its usual layout.

        Args:
            raw: content of the file.
            key: of the run that the row must belong to.
        """
        try:
            blocks = self._split(raw.removesuffix(b"\n").decode("ascii"))
            row = {name: value for name, _, value in blocks}
            check_shape({**row, EXTRA: {}})
            check_extra(
                {name.removeprefix(INNER): row[name] for name in row if name.startswith(INNER)}
            )
        except (ValueError, StopIteration, RecursionError):
            return None
        # A row of an older schema must be upgraded first.
        current = isinstance(row.get("schema"), int) and row["schema"] == SCHEMA
        complete = len(row) == len(blocks) and current and row["run_key"] == key
        return blocks if complete else None

    def _split(self, text: str, level: str = "") -> list[RowBlock]:
        """Return the entries of a table written one per line; raises ValueError for another layout.

        `{`, names and values separated by `": `, each followed by `,` except the last, `}`: if every name is a word and
        every value is JSON, the text as a whole is JSON and holds exactly these entries.
        """
        indent = "  " if level else " "
        first, last = f'{{\n{indent}"', f"\n{indent[1:]}}}"
        if not (text.startswith(first) and text.endswith(last)):
            raise ValueError("another layout")
        cache, blocks = self._cache[level], []
        for line in text[len(first) : -len(last)].split(f',\n{indent}"'):
            block = cache.get(line)
            if block is None:
                name, _, value = line.partition('": ')
                if not level and name == EXTRA:
                    blocks += self._split(value, INNER)
                    continue
                block = _block(level, name, value)
                if len(cache) >= CACHE_SIZE:
                    cache.clear()
                cache[line] = block
            blocks.append(block)
        return blocks


def _block(level: str, name: str, text: str) -> RowBlock:
    """Return an entry; raises ValueError or StopIteration unless its name is a word and its text one JSON value."""
    value, end = _scan(text, 0)
    if end < len(text) or not name.isidentifier():
        raise ValueError("not an entry")
    return RowBlock(level + name, text, value)


def blocks_of(row: Row) -> list[RowBlock] | None:
    """Return the blocks of a complete row; None if their names would be ambiguous."""
    if not all(name.isidentifier() for name in (*row, *row[EXTRA])):
        return None
    values = {name: value for name, value in row.items() if name != EXTRA}
    values |= {INNER + name: value for name, value in row[EXTRA].items()}
    return [RowBlock(name, json.dumps(value), value) for name, value in values.items()]


def row_of(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a row made of some blocks, by name; `extra` is always present."""
    row: dict[str, Any] = {EXTRA: {}}
    for name, value in values:
        if name.startswith(INNER):
            row[EXTRA][name.removeprefix(INNER)] = value
        else:
            row[name] = value
    return row


def part_of(row: Row, names: Collection[str]) -> dict[str, Any]:
    """Return a complete row reduced to the named blocks."""
    top_level = (name for name in row if name in names and not name.startswith(INNER))
    part = {name: row[name] for name in top_level}
    extra = {name: value for name, value in row[EXTRA].items() if INNER + name in names}
    return {**part, EXTRA: extra}


def block_at(path: str) -> str:
    """Return the block that contains a dotted path of a row."""
    names = path.split(".")
    return ".".join(names[: 2 if names[0] == EXTRA else 1])


Result = TypeVar("Result")


def memoized(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Return a function that calls `function` once for each object that rows share."""
    results: dict[int, tuple[Any, Result]] = {}

    def call(shared: Any) -> Result:
        if id(shared) not in results:
            if len(results) >= CACHE_SIZE:
                results.clear()
            # The object is kept too: its id is unique only while it exists.
            results[id(shared)] = shared, function(shared)
        return results[id(shared)][1]

    return call
