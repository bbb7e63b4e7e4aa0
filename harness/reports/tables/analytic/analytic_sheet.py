"""One published table as formulas look at it: columns, cells beside each other, and what the names of a row say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from espalier.harness.errors import UserError
from espalier.harness.reports.tables.panels import name_of
from espalier.harness.reports.tables.printed_cell import Cell
from espalier.harness.reports.tables.published_tables import read_cells, read_paper

#: A budget that starts with a share.
SHARE = re.compile(r"(\d+(?:\.\d+)?)%.*")


@dataclass(frozen=True)
class Sheet:
    """One printed table.

    Attributes:
        name: of its file, without the ending.
        cells: in printed order.
    """

    name: str
    cells: tuple[Cell, ...]

    @classmethod
    def read(cls, folder: Path, slug: str, number: str) -> Sheet:
        """Read a table of a folder with papers' files.

        Raises:
            UserError: there is no such table, or its file is damaged.
        """
        return cls(name_of(slug, number), read_cells(read_paper(slug, folder), number, folder))

    def column(self, metric: str, **where: str) -> Iterator[Cell]:
        """Yield the cells of a column that have a value.

        Raises:
            UserError: there are none.
        """
        found = [one for one in self.cells if one.metric == metric and one.value]
        found = [one for one in found if all(getattr(one, k) == v for k, v in where.items())]
        if not found:
            raise UserError(f"{self.name} has no cell of metric={metric!r} {where or ''}")
        yield from found

    def beside(self, cell: Cell, **other: str) -> Cell:
        """Return the cell that differs from `cell` in the given keys alone.

        Raises:
            UserError: there is none.
        """
        wanted = replace(cell, **other)
        for one in self.cells:
            if one.key == wanted.key:
                return one
        raise UserError(f"{self.name} has no cell {wanted.name!r}")


def kept(cell: Cell) -> float:
    """Return the share that a budget such as `33.4% visual tokens` keeps.

    Raises:
        UserError: the budget is no such share.
    """
    return float(fits(cell, SHARE, "budget")[1]) / 100


def fits(cell: Cell, pattern: re.Pattern[str], key: str) -> re.Match[str]:
    """Return how a pattern fits a whole key of a cell, such as `split`.

    Raises:
        UserError: it does not.
    """
    text = getattr(cell, key)
    found = pattern.fullmatch(text)
    if found is None:
        raise UserError(f"{cell.name}: {key}={text!r} is not {pattern.pattern!r}")
    return found
