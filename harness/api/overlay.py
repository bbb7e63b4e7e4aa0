"""Draw pictures with the areas of dropped tokens faded out, or with a value of each token in colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from os import PathLike, fspath
from textwrap import shorten
from typing import Any, cast

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.font_manager import FontProperties, findfont, get_font
from PIL import Image

from espalier.harness.api.notebook_figure import Drawing
from espalier.harness.api.visible_tokens import TokenGrid, VisibleChat
from espalier.harness.errors import UserError

#: Longest edge of a drawn picture in pixels; its width in inches, and the minimum width if there are many; pictures
#: per row.
EDGE = 720
WIDTH = 4.2
SMALL = 2.0
ACROSS = 6

#: Maximum length, in characters, of the question and answer in a figure's title.
CAPTION_LENGTH = 70

#: Blend with white, 0 to 1, of the area of a dropped token, and of an area that no token covers.
FADED = 0.72
UNSEEN = 0.93

#: Colours of values, and their share of a pixel for the lowest and the highest: the picture stays visible.
COLOURS = "plasma"
THINNEST, THICKEST = 0.25, 0.8

#: Index of an area that no token covers.
_OUTSIDE = -1

#: Paints the pixels (H, W, 3) of a picture by the token (H, W) at each of them, `_OUTSIDE` where there is none.
Paint = Callable[[np.ndarray, np.ndarray], np.ndarray]


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
    alive = np.zeros(len(visible.tokens), dtype=bool)
    alive[list(kept)] = True

    def paint(pixels: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        outside = tokens == _OUTSIDE
        return _faded(pixels, ~outside & alive[tokens], outside)

    figure, _ = _figure(
        visible, paint, lambda tokens: f"{int(alive[tokens].sum())} of {len(tokens)}", title
    )
    return _saved(figure, path)


def draw_values(
    visible: VisibleChat, values: np.ndarray, title: str, path: str | PathLike[str] | None = None
) -> Drawing:
    """Draw the pictures of a chat with the value of each token in colour, on one scale for all of them.

    Args:
        visible: pictures and the areas of their tokens.
        values: (N,) values; NaN draws a token like a dropped one.
        title: title of the figure.
        path: also save the figure to this file.

    Raises:
        UserError: there is no picture, or the file cannot be written.
    """
    present = np.isfinite(values)
    numbers = values[present] if present.any() else np.zeros(1)
    lowest = float(numbers.min())
    scale = Normalize(lowest, float(numbers.max()))
    colours = ScalarMappable(scale, COLOURS)

    def paint(pixels: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        outside = tokens == _OUTSIDE
        coloured = ~outside & present[tokens]
        numbers = np.where(present, values, lowest)
        of_tokens = colours.to_rgba(numbers)[:, :3]
        share = THINNEST + (THICKEST - THINNEST) * np.asarray(scale(numbers))
        grey, shares = pixels.mean(2, keepdims=True), share[tokens][..., None]
        mixed = of_tokens[tokens] * shares + grey * (1 - shares)
        return np.where(coloured[..., None], mixed, _faded(pixels, coloured, outside))

    figure, axes = _figure(visible, paint, lambda tokens: "", title)
    figure.colorbar(colours, ax=axes, shrink=0.8, pad=0.02).ax.tick_params(labelsize=7)
    return _saved(figure, path)


def _figure(
    visible: VisibleChat, paint: Paint, caption: Callable[[np.ndarray], str], title: str
) -> tuple[Drawing, list[Any]]:
    """Return a figure with a panel for each view of each picture, and its axes.

    Args:
        visible: pictures and the areas of their tokens.
        paint: paints one panel.
        caption: returns the words under a panel's name, from the indices of its tokens.
        title: title of the figure.

    Raises:
        UserError: there is no picture, or tokens have no place in it.
    """
    panels = _panels(visible)
    if not panels:
        reason = (
            "the visual tokens of this model have no place in the picture"
            if len(visible.tokens)
            else "this answer belongs to a question without pictures"
        )
        raise UserError(f"show(): {reason}")
    rows = ceil(len(panels) / ACROSS)
    columns = ceil(len(panels) / rows)
    width = WIDTH if len(panels) <= 2 else max(SMALL, WIDTH * 2 / columns)
    tallest = max(
        p.height / p.width for p in (visible.images[grids[0].image].picture for _, grids in panels)
    )
    height = rows * (width * min(tallest, 2.0) + 0.3) + 0.45
    figure = Drawing(figsize=(columns * width, height), dpi=110, layout="constrained")
    axes = [*np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()]
    for axis in axes:
        axis.axis("off")
    for axis, (name, grids) in zip(axes, panels, strict=False):
        picture = _shrunk(visible.images[grids[0].image].picture)
        tokens = _tokens_at(visible, grids, picture.height, picture.width)
        pixels = paint(np.asarray(picture, dtype=np.float32) / 255, tokens)
        axis.imshow(pixels, interpolation="nearest")
        if len(panels) > 1:
            numbers = [visible.grids.index(grid) for grid in grids]
            words = caption(np.flatnonzero(np.isin(visible.tokens[:, 0], numbers)))
            axis.set_title(": ".join(filter(None, (name, words))), fontsize=8)
    figure.suptitle(title, fontsize=10, parse_math=False)
    return figure, axes


def captioned(title: str, caption: str) -> str:
    """Return a title with a caption below it, cut to the figure, unless the font lacks a character of it."""
    caption = shorten(caption, CAPTION_LENGTH, placeholder=" ...")
    font = get_font(findfont(FontProperties()))
    drawable = all(font.get_char_index(ord(character)) for character in caption)
    return f"{title}\n{caption}" if drawable else title


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


def _tokens_at(visible: VisibleChat, grids: list[TokenGrid], height: int, width: int) -> np.ndarray:
    """Return (height, width) the token at each pixel of a picture, `_OUTSIDE` where no token of these grids lies."""
    numbers = [visible.grids.index(grid) for grid in grids]
    tokens = np.full((height, width), _OUTSIDE)
    for token in np.flatnonzero(np.isin(visible.tokens[:, 0], numbers)):
        number, row, column = visible.tokens[token]
        grid = visible.grids[number]
        box = grid.box.cell(int(row), int(column), grid.rows, grid.columns)
        x = slice(*_pixels(box.left, box.right, width))
        y = slice(*_pixels(box.top, box.bottom, height))
        tokens[y, x] = token
    return tokens


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


def _faded(pixels: np.ndarray, kept: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Return (H, W, 3) pixels: grey and faded where they are not `kept`, faded further `outside` of all tokens."""
    grey = pixels.mean(2, keepdims=True).repeat(3, axis=2)
    share = np.select([kept, outside], [0.0, UNSEEN], FADED)[..., None]
    base = np.where(kept[..., None], pixels, grey)
    return cast("np.ndarray", base * (1 - share) + share)


def _saved(figure: Drawing, path: str | PathLike[str] | None) -> Drawing:
    """Return a figure, saved if there is a path."""
    if path is None:
        return figure
    try:
        figure.savefig(fspath(path), bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(
            f"show(path={fspath(path)!r}) cannot be written: {' '.join(str(error).split())}"
        ) from error
    return figure
