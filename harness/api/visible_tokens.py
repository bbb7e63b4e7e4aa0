"""Map each visual token of a chat to its area on a picture or frame."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from espalier.harness.engine.layout import to_host
from espalier.harness.media.frames import Clip
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.chat_media import Chat
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox


@dataclass(frozen=True, eq=False)
class VisibleImage:
    """A picture or a frame of a video.

    Attributes:
        name: title in a figure; empty for a single picture.
        picture: RGB.
    """

    name: str
    picture: Image.Image


@dataclass(frozen=True, eq=False)
class TokenGrid:
    """A grid of visual tokens on one picture.

    Attributes:
        image: index of the picture.
        view: the model's number of this view; 0 is the global view.
        box: area of the grid on the picture.
        rows: number of rows.
        columns: number of columns.
    """

    image: int
    view: int
    box: ViewBox
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class VisibleChat:
    """The pictures of a chat and the areas of its visual tokens.

    Attributes:
        images: pictures and frames in the order of the prompt.
        grids: grids of tokens on them; none if the model's tokens have no place in the picture.
        tokens: (N, 3) grid, row and column of each visual token.
    """

    images: tuple[VisibleImage, ...] = ()
    grids: tuple[TokenGrid, ...] = ()
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))


def visible_chat(adapter: Adapter, chat: Chat, grid: np.ndarray) -> VisibleChat:
    """Return the areas of a chat's visual tokens.

    Args:
        adapter: the model.
        chat: a chat with opened pictures and clips.
        grid: (N, 4) picture or frame, view, row and column of each token (`Layout.grid`).
    """
    if adapter.data.unplaced or not len(grid):
        return VisibleChat(tokens=np.zeros((len(grid), 3), dtype=np.int64))
    media = adapter.load_media(chat)
    order = [*_order(adapter, chat)]
    frames = _frames_of(media.clips, int(grid[:, 0].max()) + 1 - len(media.pictures))
    pictures = iter(_numbered(media.pictures, bool(media.clips)))
    clips = iter(zip(media.clips, frames, strict=True))
    images: list[VisibleImage] = []
    pictures_at: set[int] = set()
    for medium in order:
        if medium == "image":
            pictures_at.add(len(images))
            images.append(next(pictures))
        else:
            images += _clip_images(*next(clips))
    grids: list[TokenGrid] = []
    tokens = np.zeros((len(grid), 3), dtype=np.int64)
    for number, view in sorted({(int(a), int(b)) for a, b in grid[:, :2]}):
        in_view = (grid[:, 0] == number) & (grid[:, 1] == view)
        rows, columns = (int(side) + 1 for side in grid[in_view, 2:].max(0))
        tiles = len({int(tile) for tile in grid[grid[:, 0] == number, 1]} - {0})
        box = WHOLE
        if number in pictures_at:
            size, single = images[number].picture.size, len(media.pictures) == 1
            box = adapter.view_box(PictureView(size, view, rows, columns, tiles, single))
        tokens[in_view] = np.column_stack(
            [np.full(in_view.sum(), len(grids)), grid[in_view, 2], grid[in_view, 3]]
        )
        grids.append(TokenGrid(number, view, box, rows, columns))
    return VisibleChat(tuple(images), tuple(grids), tokens)


def _order(adapter: Adapter, chat: Chat) -> Iterable[str]:
    """Return `image` and `video` in the order of the prompt's placeholders; a template may put videos first."""
    text = adapter.prompt_text(chat, adapter.load_media(chat))
    kinds = dict(zip(adapter.data.placeholders, ("image", "video"), strict=False))
    return (kinds[word] for word in re.findall("|".join(map(re.escape, kinds)), text))


def _frames_of(clips: Sequence[Clip], places: int) -> list[int]:
    """Return the time steps of each clip: one per frame, or one per pair of frames."""
    for joined in (1, 2):
        counts = [-(-len(clip.frames) // joined) for clip in clips]
        if sum(counts) == places:
            return counts
    raise ValueError(f"{places} places in time for clips of {[len(item.frames) for item in clips]}")


def _numbered(pictures: Sequence[Image.Image], with_video: bool) -> list[VisibleImage]:
    """Name several pictures by number; a single picture has a name only next to a video."""
    if len(pictures) == 1:
        return [VisibleImage("picture" if with_video else "", pictures[0])]
    return [
        VisibleImage(f"picture {number}", picture) for number, picture in enumerate(pictures, 1)
    ]


def _clip_images(clip: Clip, places: int) -> list[VisibleImage]:
    """Return the first frame of each time step."""
    joined = -(-len(clip.frames) // places)
    return [
        VisibleImage(f"{clip.timestamps[n]:.1f} s", Image.fromarray(clip.frames[n]))
        for n in range(0, len(clip.frames), joined)
    ]


def grid_rows(adapter: Adapter, inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the (N, 4) grid of each row of encoded inputs, without its padding. Cost: one transfer to the host."""
    names = ("input_ids", "attention_mask")
    on_host = dict(zip(names, to_host(*(inputs[name] for name in names)), strict=True))
    layout = adapter.layout(
        {**{name: value for name, value in inputs.items() if name != "chats"}, **on_host}
    )
    grid = layout.grid.numpy()
    return [positions[:count] for positions, count in zip(grid, layout.counts, strict=True)]
