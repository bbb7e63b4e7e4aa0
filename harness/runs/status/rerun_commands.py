"""The shortest commands that run some cells of a sweep and no others."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from espalier.harness.store.sweep_files import SweepCell

Line = tuple[str, ...]


def commands(cells: Sequence[SweepCell]) -> list[str]:
    """Return command lines that together have exactly these cells."""
    found = products([cell.line for cell in cells if cell.line])
    return [shlex.join(["python", "run.py", *line]) for line in found]


def products(lines: Sequence[Sequence[str]]) -> list[Line]:
    """Return the arguments of commands that together have exactly these cells: products where cells make one up.

    Args:
        lines: the overrides of each cell, `key=value`.
    """
    left = list(dict.fromkeys(map(tuple, lines)))
    several: set[Line] = set()
    for key in dict.fromkeys(_key(text) for line in left for text in line):
        left = _merged(left, key, several)
    return [("-m", *line) if line in several else line for line in left]


def _merged(lines: Sequence[Line], key: str, several: set[Line]) -> list[Line]:
    """Return the lines, those that differ in the value of one key alone put together and noted as several."""
    groups: dict[tuple[int, Line], list[Line]] = {}
    for line in lines:
        rest = tuple(text for text in line if _key(text) != key)
        # A line that does not have the key is none of those that have it, whatever the rest.
        groups.setdefault((len(line), rest), []).append(line)
    merged = []
    for group in groups.values():
        if len(group) == 1:
            merged += group
            continue
        joined = ",".join(_value(line, key) for line in group)
        one = tuple(f"{key}={joined}" if _key(text) == key else text for text in group[0])
        several.add(one)
        merged.append(one)
    return merged


def _key(text: str) -> str:
    return text.partition("=")[0]


def _value(line: Line, key: str) -> str:
    return next(text.partition("=")[2] for text in line if _key(text) == key)
