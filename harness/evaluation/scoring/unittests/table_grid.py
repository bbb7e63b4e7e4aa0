"""Tables of an answer as grids, with neighbours and headings of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import lxml.html
from lxml import etree

from espalier.harness.errors import FOREIGN

#: Largest span of a cell; answers may give any number.
WIDEST = 100

Place = tuple[int, int]


@dataclass(frozen=True)
class GridCell:
    """A cell of a table, as written."""

    text: str
    heading: bool = False
    rows: int = 1
    columns: int = 1


@dataclass
class Grid:
    """Cells by the position of their upper left corner; `squares` maps each position to the corner of its cell."""

    cells: dict[Place, GridCell] = field(default_factory=dict)
    squares: dict[Place, Place] = field(default_factory=dict)
    height: int = 0
    width: int = 0

    def neighbours(self, corner: Place, down: int, right: int) -> set[Place]:
        """Return the next cells in a direction, across gaps; a cell that spans several rows may have several."""
        cell = self.cells[corner]
        corners = set()
        for row in range(corner[0], corner[0] + (1 if down else cell.rows)):
            for column in range(corner[1], corner[1] + (1 if right else cell.columns)):
                at = (row, column)
                while True:
                    at = (at[0] + down, at[1] + right)
                    if not (0 <= at[0] < self.height and 0 <= at[1] < self.width):
                        break
                    neighbour = self.squares.get(at)
                    if neighbour is not None and neighbour != corner:
                        corners.add(neighbour)
                        break
        return corners

    def headings(self, corner: Place, down: int, right: int) -> set[Place]:
        """Return the headings in a direction; without headings, the last cells in that direction."""
        visited, waiting = set(), {corner}
        heads, ends = set(), set()
        while waiting:
            at = waiting.pop()
            visited.add(at)
            if self.cells[at].heading:
                heads.add(at)
            following = self.neighbours(at, down, right)
            if not following:
                ends.add(at)
            waiting |= following - visited
        return (heads - {corner}) or (ends - {corner})


def grids(answer: str) -> Iterator[Grid]:
    """Yield the tables of an answer, written with pipes or in HTML. Never raises."""
    yield from _of_pipes(answer)
    yield from _of_html(answer)


def laid_out(rows: Sequence[Sequence[GridCell]]) -> Grid:
    """Return rows of cells as a grid: each cell takes the first free position of its row."""
    grid = Grid()
    for row, cells in enumerate(rows):
        column = 0
        for cell in cells:
            while (row, column) in grid.squares:
                column += 1
            corner = (row, column)
            grid.cells[corner] = cell
            for at in (
                (row + i, column + j) for i in range(cell.rows) for j in range(cell.columns)
            ):
                grid.squares[at] = corner
            column += cell.columns
    grid.height = max((row for row, _ in grid.squares), default=-1) + 1
    grid.width = max((column for _, column in grid.squares), default=-1) + 1
    return grid


def _of_pipes(answer: str) -> Iterator[Grid]:
    table: list[str] = []
    for line in [*answer.strip().split("\n"), ""]:
        if "|" in line:
            table.append(line)
            continue
        rows = [_cells(line) for line in table if not (line.strip() and set(line) <= set("- :|"))]
        if len(table) >= 2 and any(rows):
            yield laid_out(
                [
                    [
                        GridCell(text, heading=not (number and place))
                        for place, text in enumerate(row)
                    ]
                    for number, row in enumerate(row for row in rows if row)
                ]
            )
        table = []


def _cells(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.split("|")]
    cells = cells[1:] if not cells[0] else cells
    return cells[:-1] if cells and not cells[-1] else cells


def _of_html(answer: str) -> Iterator[Grid]:
    if "<table" not in answer.lower():
        return
    parser = lxml.html.HTMLParser(remove_comments=True, encoding="utf-8")
    try:
        page = lxml.html.fromstring(f"<div>{answer}</div>".encode(errors="replace"), parser=parser)
    except (*FOREIGN, etree.ParserError):
        return
    for table in page.iter("table"):
        lines = list(table.iter("tr"))
        rows = [
            [_cell(cell, len(lines) - number) for cell in line if cell.tag in ("td", "th")]
            for number, line in enumerate(lines)
        ]
        if any(rows):
            yield laid_out(rows)


def _cell(cell: lxml.html.HtmlElement, rows_left: int) -> GridCell:
    for end in cell.iter("br"):
        end.tail = "\n" + (end.tail or "")
    heading = cell.tag == "th" or any(above.tag == "thead" for above in cell.iterancestors())
    rows = rows_left if (cell.get("rowspan") or "").strip() == "0" else _span(cell.get("rowspan"))
    return GridCell(
        cell.text_content().strip(), heading, min(rows, WIDEST), _span(cell.get("colspan"))
    )


def _span(value: str | None) -> int:
    digits = (value or "").strip()
    return min(max(int(digits), 1), WIDEST) if digits.isascii() and digits.isdigit() else 1


#: Fields of a test about a cell's surroundings, and the cells that they refer to.
Look = Callable[[Grid, Place], set[Place]]
AROUND: dict[str, Look] = {
    "up": lambda grid, at: grid.neighbours(at, -1, 0),
    "down": lambda grid, at: grid.neighbours(at, 1, 0),
    "left": lambda grid, at: grid.neighbours(at, 0, -1),
    "right": lambda grid, at: grid.neighbours(at, 0, 1),
    "top_heading": lambda grid, at: grid.headings(at, -1, 0),
    "left_heading": lambda grid, at: grid.headings(at, 0, -1),
}
