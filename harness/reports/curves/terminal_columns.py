"""Tables on a terminal that are never wider than it: what does not fit beside the rest stands below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

#: Blanks between two columns.
GAP = 2


@dataclass(frozen=True)
class Column:
    """One column: its heading, and its cells from the top."""

    heading: str
    cells: tuple[str, ...]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """How wide it is with the gap behind it."""
        return max(map(cell_len, (self.heading, *self.cells))) + GAP


def fits(columns: Sequence[Column], width: int) -> bool:
    """Say whether columns fit beside each other into `width`."""
    return sum(column.width for column in columns) - GAP <= width


def beside(columns: Sequence[Column], title: str | None = None) -> Table:
    """Return one table of columns, each as wide as it needs to be."""
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
    )
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def below(
    names: Sequence[Column], groups: Sequence[Sequence[Column]], width: int, title: str
) -> list[RenderableType]:
    """Return a title and as many tables below each other as it takes, each with the names of its rows.

    Args:
        names: columns that say what a row is of, the longest of which wraps where they leave too little room.
        groups: what there is to say of it; where not all of it fits, a group begins a table, and goes on in another
            where it must.
        width: of the terminal.
        title: stands above them all.
    """
    room = max(width - sum(column.width for column in names), width // 3)
    every = [column for group in groups for column in group]
    parts = [every] if fits(every, room) else _parts(groups, room)
    shown: list[RenderableType] = ["", Text(title, style="italic")]
    for place, part in enumerate(parts):
        shown += [*([""] if place else []), _folded(names, part, width)]
    return shown


def _parts(groups: Sequence[Sequence[Column]], room: int) -> list[list[Column]]:
    parts: list[list[Column]] = []
    for group in groups:
        parts.append([])
        for column in group:
            if parts[-1] and not fits([*parts[-1], column], room):
                parts.append([])
            parts[-1].append(column)
    return parts


def _folded(names: Sequence[Column], values: Sequence[Column], width: int) -> Table:
    table = beside([*names, *values])
    if not fits([*names, *values], width):
        longest = max(range(len(names)), key=lambda index: names[index].width)
        table.columns[longest].no_wrap = False
        table.columns[longest].overflow = "fold"
    return table
