"""Terminal tables that are never wider than the terminal: columns that do not fit go into further tables below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

#: Spaces between two columns.
GAP = 2


@dataclass(frozen=True)
class TerminalColumn:
    """A column: its heading, and its cells from the top."""

    heading: str
    cells: tuple[str, ...]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """Its width with the gap after it."""
        return max(map(cell_len, (self.heading, *self.cells))) + GAP


def fits(columns: Sequence[TerminalColumn], width: int) -> bool:
    """Return whether the columns fit into `width` in one table."""
    return sum(column.width for column in columns) - GAP <= width


def side_by_side(columns: Sequence[TerminalColumn], title: str | None = None) -> Table:
    """Return one table of the columns, each as wide as it needs to be."""
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
    )
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def stacked_tables(
    names: Sequence[TerminalColumn],
    groups: Sequence[Sequence[TerminalColumn]],
    width: int,
    title: str,
) -> list[RenderableType]:
    """Return a title and as many tables as needed to fit the width, each with the row names.

    Args:
        names: columns that name the rows; the longest wraps if they leave too little room.
        groups: value columns; if not all fit, each group starts a new table and continues in another where necessary.
        width: of the terminal.
        title: above all tables.
    """
    room = max(width - sum(column.width for column in names), width // 3)
    columns = [column for group in groups for column in group]
    parts = [columns] if fits(columns, room) else _parts(groups, room)
    tables: list[RenderableType] = ["", Text(title, style="italic")]
    for index, part in enumerate(parts):
        tables += [*([""] if index else []), _table_within(names, part, width)]
    return tables


def _parts(groups: Sequence[Sequence[TerminalColumn]], room: int) -> list[list[TerminalColumn]]:
    parts: list[list[TerminalColumn]] = []
    for group in groups:
        parts.append([])
        for column in group:
            if parts[-1] and not fits([*parts[-1], column], room):
                parts.append([])
            parts[-1].append(column)
    return parts


def _table_within(
    names: Sequence[TerminalColumn], values: Sequence[TerminalColumn], width: int
) -> Table:
    table = side_by_side([*names, *values])
    if not fits([*names, *values], width):
        longest = max(range(len(names)), key=lambda index: names[index].width)
        table.columns[longest].no_wrap = False
        table.columns[longest].overflow = "fold"
    return table
