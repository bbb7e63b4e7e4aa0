"""A published table for formulas: columns, sibling cells, and values parsed from a row's names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from espalier.harness.errors import UserError
from espalier.harness.reports.tables.published_tables import (
    PrintedCell,
    name_of,
    read_cells,
    read_paper,
)

#: A budget that starts with a percentage.
SHARE = re.compile(r"(\d+(?:\.\d+)?)%.*")


@dataclass(frozen=True)
class PrintedSheet:
    """A printed table.

    Attributes:
        name: of its file, without suffix.
        cells: in printed order.
    """

    name: str
    cells: tuple[PrintedCell, ...]

    @classmethod
    def read(cls, folder: Path, slug: str, number: str) -> PrintedSheet:
        """Read a table from a folder with papers' files.

        Raises:
            UserError: there is no such table, or its file is damaged.
        """
        return cls(name_of(slug, number), read_cells(read_paper(slug, folder), number, folder))

    def column(self, metric: str, **where: str) -> Iterator[PrintedCell]:
        """Yield the cells of a column that have a value.

        Raises:
            UserError: there are none.
        """
        cells = [cell for cell in self.cells if cell.metric == metric and cell.value]
        cells = [
            cell
            for cell in cells
            if all(getattr(cell, key) == value for key, value in where.items())
        ]
        if not cells:
            raise UserError(f"{self.name} has no cell of metric={metric!r} {where or ''}")
        yield from cells

    def sibling(self, cell: PrintedCell, **changes: str) -> PrintedCell:
        """Return the cell that differs from `cell` only in the given keys.

        Raises:
            UserError: there is none.
        """
        target = replace(cell, **changes)
        for candidate in self.cells:
            if candidate.key == target.key:
                return candidate
        raise UserError(f"{self.name} has no cell {target.name!r}")


def kept(cell: PrintedCell) -> float:
    """Return the share that a budget such as `33.4% visual tokens` keeps.

    Raises:
        UserError: the budget has no such share.
    """
    return float(full_match(cell, SHARE, "budget")[1]) / 100


def full_match(cell: PrintedCell, pattern: re.Pattern[str], key: str) -> re.Match[str]:
    """Return the match of a pattern with the complete value of a cell's key, such as `split`.

    Raises:
        UserError: it does not match.
    """
    text = getattr(cell, key)
    match = pattern.fullmatch(text)
    if match is None:
        raise UserError(f"{cell.name}: {key}={text!r} is not {pattern.pattern!r}")
    return match
