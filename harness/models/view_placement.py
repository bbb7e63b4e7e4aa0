"""Areas of a model's views on a picture, as fractions of the picture's width and height."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ViewBox:
    """A rectangle on a picture, which spans 0 to 1; that of a padded view reaches beyond."""

    left: float
    top: float
    right: float
    bottom: float

    def cell(self, row: int, column: int, rows: int, columns: int) -> ViewBox:
        """Return one cell of the rectangle divided into a grid."""
        width, height = (self.right - self.left) / columns, (self.bottom - self.top) / rows
        left, top = self.left + column * width, self.top + row * height
        return ViewBox(left, top, left + width, top + height)


WHOLE = ViewBox(0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class PictureView:
    """A view of a picture, as a grid of visual tokens.

    Attributes:
        size: width and height of the picture in pixels.
        index: number of the view in `Item.grid`; 0 is the global view.
        rows: rows of the grid.
        columns: columns of the grid.
        tiles: number of the picture's views without view 0.
        only_picture: whether the chat has no other picture.
    """

    size: tuple[int, int]
    index: int
    rows: int
    columns: int
    tiles: int
    only_picture: bool


def padded_box(view: PictureView) -> ViewBox:
    """Return the area of a view with square cells that contains the whole picture, centred."""
    width, height = view.size
    scale = min(view.columns / width, view.rows / height)
    return _around(view.columns / (width * scale), view.rows / (height * scale))


def central_square(size: tuple[int, int], share: float = 1.0) -> ViewBox:
    """Return the central square of a picture, with an edge of `share` of the picture's shorter edge."""
    edge = min(size) * share
    return _around(edge / size[0], edge / size[1])


def _around(width: float, height: float) -> ViewBox:
    return ViewBox((1 - width) / 2, (1 - height) / 2, (1 + width) / 2, (1 + height) / 2)
