"""The shortest commands that run exactly some cells of a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from espalier.harness.specs.commands import RUN
from espalier.harness.store.sweep_files import SweepCell

Line = tuple[str, ...]


def commands(cells: Sequence[SweepCell]) -> list[str]:
    """Return command lines that together have exactly these cells."""
    lines = products([cell.line for cell in cells if cell.line])
    return [shlex.join([*RUN.split(), *line]) for line in lines]


def products(lines: Sequence[Sequence[str]]) -> list[Line]:
    """Return arguments of commands that together have exactly these cells: products wherever cells form one.

    Args:
        lines: the overrides of each cell, `key=value`.
    """
    remaining = list(dict.fromkeys(map(tuple, lines)))
    joined_lines: set[Line] = set()
    for key in dict.fromkeys(_key(text) for line in remaining for text in line):
        remaining = _merged(remaining, key, joined_lines)
    return [("-m", *line) if line in joined_lines else line for line in remaining]


def _merged(lines: Sequence[Line], key: str, joined_lines: set[Line]) -> list[Line]:
    """Return the lines after joining those that differ only in the value of one key."""
    groups: dict[tuple[int, Line], list[Line]] = {}
    for line in lines:
        other_texts = tuple(text for text in line if _key(text) != key)
        # The length separates lines without the key from those that have it.
        groups.setdefault((len(line), other_texts), []).append(line)
    merged = []
    for group in groups.values():
        if len(group) == 1:
            merged += group
            continue
        values = ",".join(_value(line, key) for line in group)
        joined_line = tuple(f"{key}={values}" if _key(text) == key else text for text in group[0])
        joined_lines.add(joined_line)
        merged.append(joined_line)
    return merged


def _key(text: str) -> str:
    return text.partition("=")[0]


def _value(line: Line, key: str) -> str:
    return next(text.partition("=")[2] for text in line if _key(text) == key)
