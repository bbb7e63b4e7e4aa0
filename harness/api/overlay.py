"""Draw pictures with the areas of dropped tokens faded out."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil
from os import PathLike, fspath
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from PIL import Image

from espalier.harness.api.visible_tokens import TokenGrid, VisibleChat
from espalier.harness.errors import UserError

#: Longest edge of a drawn picture in pixels; its width in inches, and the minimum width if there are many; pictures
#: per row.
EDGE = 720
WIDTH = 4.2
SMALL = 2.0
ACROSS = 6

#: Blend with white, 0 to 1, of the area of a dropped token, and of an area that no token covers.
FADED = 0.72
UNSEEN = 0.93

#: Mask values.
_OUTSIDE, _DROPPED, _KEPT = 0, 1, 2


class Drawing(Figure):
    """A matplotlib figure that notebooks display."""

    def _repr_png_(self) -> bytes:
        """Return the figure as PNG."""
        buffer = BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()


def draw(
    visible: VisibleChat, kept: Sequence[int], title: str, path: str | PathLike[str] | None = None
) -> Drawing:
    """Draw the pictures of a chat with the areas of dropped tokens faded out.

    Args:
        visible: pictures and the areas of their tokens.
        kept: indices of the kept tokens.
        title: title of the figure.
        path: also save the figure to this file.

    Raises:
        UserError: there is no picture, or the file cannot be written.
    """
    panels = _panels(visible)
    if not panels:
        raise UserError("show(): this answer belongs to a question without pictures")
    alive = np.zeros(len(visible.tokens), dtype=bool)
    alive[list(kept)] = True
    rows = ceil(len(panels) / ACROSS)
    columns = ceil(len(panels) / rows)
    width = WIDTH if len(panels) <= 2 else max(SMALL, WIDTH * 2 / columns)
    tallest = max(
        p.height / p.width for p in (visible.images[grids[0].image].picture for _, grids in panels)
    )
    height = rows * (width * min(tallest, 2.0) + 0.3) + 0.45
    figure = Drawing(figsize=(columns * width, height), dpi=110, layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, (name, grids) in zip(axes, panels, strict=False):
        _panel(axis, visible, grids, alive, name if len(panels) > 1 else "")
    figure.suptitle(title, fontsize=10, parse_math=False)
    if path is not None:
        _save(figure, fspath(path))
    return figure


def drawable(text: str) -> bool:
    """Return whether the figure's font has every character of a text."""
    font = get_font(findfont(FontProperties()))
    return all(font.get_char_index(ord(character)) for character in text)


def _panels(visible: VisibleChat) -> list[tuple[str, list[TokenGrid]]]:
    """Return (title, grids) of each panel: one for a picture's global view and one for its tiles, if present."""
    panels = []
    for number, image in enumerate(visible.images):
        grids = [grid for grid in visible.grids if grid.image == number]
        parts = {
            "whole": [grid for grid in grids if grid.view == 0],
            "tiles": [grid for grid in grids if grid.view],
        }
        has_both = all(parts.values())
        for part, grids in parts.items():
            if grids:
                panels.append(
                    (", ".join(filter(None, (image.name, part if has_both else ""))), grids)
                )
    return panels


def _panel(
    axis: Any, visible: VisibleChat, grids: list[TokenGrid], alive: np.ndarray, name: str
) -> None:
    picture = _shrunk(visible.images[grids[0].image].picture)
    numbers = [visible.grids.index(grid) for grid in grids]
    on_image = np.isin(visible.tokens[:, 0], numbers)
    mask = np.full((picture.height, picture.width), _OUTSIDE)
    for token in np.flatnonzero(on_image):
        number, row, column = visible.tokens[token]
        grid = visible.grids[number]
        box = grid.box.cell(int(row), int(column), grid.rows, grid.columns)
        x = slice(*_pixels(box.left, box.right, picture.width))
        y = slice(*_pixels(box.top, box.bottom, picture.height))
        mask[y, x] = _KEPT if alive[token] else _DROPPED
    axis.imshow(_faded(np.asarray(picture, dtype=np.float32) / 255, mask), interpolation="nearest")
    counts = f"{int(alive[on_image].sum())} of {int(on_image.sum())}"
    if name:
        axis.set_title(f"{name}: {counts}", fontsize=8)


def _shrunk(picture: Image.Image) -> Image.Image:
    """Return the picture resized to a longer edge of `EDGE` pixels; small pictures would have ragged cells."""
    scale = EDGE / max(picture.size)
    size = tuple(max(1, round(side * scale)) for side in picture.size)
    resampling = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS
    return picture.resize((size[0], size[1]), resampling)


def _pixels(start: float, end: float, length: int) -> tuple[int, int]:
    """Return a half-open range of pixels; neighbouring cells share their border, so no pixel falls between them."""
    first, last = (min(max(round(edge * length), 0), length) for edge in (start, end))
    return first, last


def _faded(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return (H, W, 3) pixels: grey and faded for dropped tokens, faded further where no token lies."""
    grey = pixels.mean(2, keepdims=True).repeat(3, axis=2)
    share = np.select([mask == _DROPPED, mask == _OUTSIDE], [FADED, UNSEEN], 0.0)[..., None]
    base = np.where((mask == _KEPT)[..., None], pixels, grey)
    faded: np.ndarray = base * (1 - share) + share
    return faded


def _save(figure: Figure, path: str) -> None:
    try:
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"show(path={path!r}) cannot be written: {reason}") from error
