"""Where in a picture a model's views of it lie, in shares of the picture's width and height."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangle; it may reach beyond the picture, 0 to 1 both ways, where a view is padded."""

    left: float
    top: float
    right: float
    bottom: float

    def cell(self, row: int, column: int, rows: int, columns: int) -> Box:
        """Return one cell of the rectangle cut into a grid."""
        width, height = (self.right - self.left) / columns, (self.bottom - self.top) / rows
        left, top = self.left + column * width, self.top + row * height
        return Box(left, top, left + width, top + height)


WHOLE = Box(0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Sight:
    """A view of a picture, as a grid of visual tokens.

    Attributes:
        size: width and height of the picture.
        view: as `Item.grid` numbers them; 0 is the picture as a whole.
        rows: of the grid.
        columns: of the grid.
        tiles: views of the picture beside view 0.
        alone: whether it is the only picture of its chat.
    """

    size: tuple[int, int]
    view: int
    rows: int
    columns: int
    tiles: int
    alone: bool


def padded(sight: Sight) -> Box:
    """Return a view in the middle of which the picture stands, as large as fits, its cells square."""
    width, height = sight.size
    scale = min(sight.columns / width, sight.rows / height)
    return _around(sight.columns / (width * scale), sight.rows / (height * scale))


def cropped(size: tuple[int, int], share: float = 1.0) -> Box:
    """Return the square in the middle of a picture, `share` of its shorter edge wide."""
    edge = min(size) * share
    return _around(edge / size[0], edge / size[1])


def _around(across: float, down: float) -> Box:
    return Box((1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2)
