"""Where in a picture a model's views of it lie, in shares of the picture's width and height."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ViewBox:
    """A rectangle; it may reach beyond the picture, 0 to 1 both ways, where a view is padded."""

    left: float
    top: float
    right: float
    bottom: float

    def cell(self, row: int, column: int, rows: int, columns: int) -> ViewBox:
        """Return one cell of the rectangle cut into a grid."""
        width, height = (self.right - self.left) / columns, (self.bottom - self.top) / rows
        left, top = self.left + column * width, self.top + row * height
        return ViewBox(left, top, left + width, top + height)


WHOLE = ViewBox(0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class PictureView:
    """A view of a picture, as a grid of visual tokens.

    Attributes:
        size: width and height of the picture.
        index: as `Item.grid` numbers them; 0 is the picture as a whole.
        rows: of the grid.
        columns: of the grid.
        tiles: views of the picture beside view 0.
        only_picture: whether it is the only picture of its chat.
    """

    size: tuple[int, int]
    index: int
    rows: int
    columns: int
    tiles: int
    only_picture: bool


def padded(view: PictureView) -> ViewBox:
    """Return a view in the middle of which the picture stands, as large as fits, its cells square."""
    width, height = view.size
    scale = min(view.columns / width, view.rows / height)
    return _around(view.columns / (width * scale), view.rows / (height * scale))


def cropped(size: tuple[int, int], share: float = 1.0) -> ViewBox:
    """Return the square in the middle of a picture, `share` of its shorter edge wide."""
    edge = min(size) * share
    return _around(edge / size[0], edge / size[1])


def _around(width: float, height: float) -> ViewBox:
    return ViewBox((1 - width) / 2, (1 - height) / 2, (1 + width) / 2, (1 + height) / 2)
