"""A row in blocks: the entries of its top level, and those of `extra`, each as the text of its JSON.

Rows share most of their blocks, settings and environment above all. A file is cut where its lines say so, and a block
that another row had is not parsed again. What is cut is the row that `RunDir.row` gives, or it is not cut at all.
"""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from espalier.harness.store.files.untrusted_json import refuse_constant
from espalier.harness.store.row_shape import check_extra, check_shape
from espalier.harness.store.schema import SCHEMA

Row = Mapping[str, Any]

#: The entry of a row whose own entries are blocks: `extra.label`.
EXTRA = "extra"
INNER = f"{EXTRA}."

#: Parses one value, of which tens are in a row: a third of the time of json.loads where they are short.
_scan = json.scanner.make_scanner(json.JSONDecoder(parse_constant=refuse_constant))  # type: ignore[arg-type]

#: Blocks of one level, and objects of rows, that are remembered at most.
KEPT = 8192


class Block(NamedTuple):
    """One entry of a row; rows that have the same share the object of its value."""

    name: str
    text: str
    value: Any


class Cutter:
    """Cuts the files of rows, and remembers blocks."""

    def __init__(self) -> None:
        """Start with none."""
        self._known: dict[str, dict[str, Block]] = {"": {}, INNER: {}}

    def cut(self, raw: bytes, key: str) -> list[Block] | None:
        """Return the blocks of a `row.json`; None if it is not surely a row of this version, written as rows are.

        Args:
            raw: the file.
            key: of the run that it is to be the row of.
        """
        try:
            blocks = self._cut(raw.removesuffix(b"\n").decode("ascii"))
            row = {name: value for name, _, value in blocks}
            check_shape({**row, EXTRA: {}})
            check_extra(
                {name.removeprefix(INNER): row[name] for name in row if name.startswith(INNER)}
            )
        except (ValueError, StopIteration, RecursionError):
            return None
        # One that is to be lifted is no longer what its file says.
        current = isinstance(row.get("schema"), int) and row["schema"] == SCHEMA
        whole = len(row) == len(blocks) and current and row["run_key"] == key
        return blocks if whole else None

    def _cut(self, text: str, level: str = "") -> list[Block]:
        """Return the entries of a table that is written a line each; raises ValueError if it is written otherwise.

        `{`, names and values with `": ` between them and `,` behind them, `}`: where every name is a word and every
        value is JSON, the whole is JSON and holds these and nothing else.
        """
        indent = "  " if level else " "
        first, last = f'{{\n{indent}"', f"\n{indent[1:]}}}"
        if not (text.startswith(first) and text.endswith(last)):
            raise ValueError("written otherwise")
        known, blocks = self._known[level], []
        for line in text[len(first) : -len(last)].split(f',\n{indent}"'):
            block = known.get(line)
            if block is None:
                name, _, value = line.partition('": ')
                if not level and name == EXTRA:
                    blocks += self._cut(value, INNER)
                    continue
                block = _block(level, name, value)
                if len(known) >= KEPT:
                    known.clear()
                known[line] = block
            blocks.append(block)
        return blocks


def _block(level: str, name: str, text: str) -> Block:
    """Return an entry; raises ValueError or StopIteration unless its name is a word and its text one JSON value."""
    value, end = _scan(text, 0)
    if end < len(text) or not name.isidentifier():
        raise ValueError("no entry")
    return Block(level + name, text, value)


def blocks_of(row: Row) -> list[Block] | None:
    """Return the blocks of a whole row; None where their names would not tell them apart."""
    if not all(name.isidentifier() for name in (*row, *row[EXTRA])):
        return None
    told = {name: value for name, value in row.items() if name != EXTRA}
    told |= {INNER + name: value for name, value in row[EXTRA].items()}
    return [Block(name, json.dumps(value), value) for name, value in told.items()]


def row_of(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a row of some blocks, by name; `extra` is always there."""
    row: dict[str, Any] = {EXTRA: {}}
    for name, value in values:
        if name.startswith(INNER):
            row[EXTRA][name.removeprefix(INNER)] = value
        else:
            row[name] = value
    return row


def part_of(row: Row, asked: Collection[str]) -> dict[str, Any]:
    """Return a whole row as one of the asked blocks."""
    own = (name for name in row if name in asked and not name.startswith(INNER))
    part = {name: row[name] for name in own}
    extra = {name: value for name, value in row[EXTRA].items() if INNER + name in asked}
    return {**part, EXTRA: extra}


def block_at(path: str) -> str:
    """Return the block that a dotted path of a row lies in."""
    names = path.split(".")
    return ".".join(names[: 2 if names[0] == EXTRA else 1])


Made = TypeVar("Made")


def remembered(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    """Return a function that calls another once for each object that rows share."""
    known: dict[int, tuple[Any, Made]] = {}

    def call(shared: Any) -> Made:
        if id(shared) not in known:
            if len(known) >= KEPT:
                known.clear()
            # The object is kept too: its id is its own as long as it is there.
            known[id(shared)] = shared, make(shared)
        return known[id(shared)][1]

    return call
