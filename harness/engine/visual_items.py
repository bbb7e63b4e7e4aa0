"""Images and videos of a batch: their placeholders, their cost before the decoder, and the layout of the batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from espalier.harness.cost.row_work import NO_WORK, Work
from espalier.harness.engine.layout import Layout
from espalier.harness.errors import UserError
from espalier.harness.specs.run_spec import Separators


@dataclass(frozen=True, eq=False)
class VisualItem:
    """The placeholders of one image or video in the prompt, in sequence order.

    Attributes:
        grid: (n, 4) image or frame (from 0), view, row and column of each placeholder.
        source: (n, S) projector units that each one is a mixture of, numbered over all calls of the projector.
        share: (n, S) weight of each; None for one unit each.
        prunable: (n,) False for newline and separator tokens; None if all are prunable.
        tile: (n,) crop of the image that each one lies in, 0 for the global view; None: the view.
        work: cost before the decoder.
    """

    grid: Tensor
    source: Tensor
    share: Tensor | None = None
    prunable: Tensor | None = None
    tile: Tensor | None = None
    work: Work = NO_WORK

    def __len__(self) -> int:
        """Return the number of placeholders."""
        return self.grid.shape[0]


def rectangle(images: int, height: int, width: int, view: int = 0) -> Tensor:
    """Return (images * height * width, 4) coordinates of full grids in raster order, image by image."""
    axes = (torch.arange(images), torch.tensor([view]), torch.arange(height), torch.arange(width))
    return torch.cartesian_prod(*axes)


def framed_rectangle(height: int, width: int, newlines: bool = True) -> tuple[Tensor, Tensor]:
    """Return row and column (n, 2) of a grid between a begin and an end, with a newline after each row or without.

    Begin and end take the places of the first cell and of the last. Also returns (n,): False for all but cells.
    """
    cells = torch.cartesian_prod(torch.arange(height), torch.arange(width + int(newlines)))
    places = torch.cat([cells[:1], cells, cells[-1:]])
    prunable = places[:, 1] < width
    prunable[0] = prunable[-1] = False
    return places, prunable


def read_layout(
    ids: Tensor,
    valid: Tensor,
    items: Mapping[int, Sequence[VisualItem]],
    separators: Separators = "keep",
) -> Layout:
    """Find every image's and video's placeholders in a batch of prompts.

    Args:
        ids: (B, L) prompts.
        valid: (B, L) False for padding.
        items: for each placeholder id, the batch's images or videos in the order of their placeholders.
        separators: whether newline and separator tokens stay, or count as ordinary visual tokens.

    Raises:
        UserError: a row with placeholders that do not add up to complete images or videos.

    Cost: one transfer of `ids` to the host, tables on the host, one transfer back.
    """
    host_ids, host_valid = ids.cpu().numpy(), valid.cpu().numpy()
    units = max(
        (item.source.shape[1] for items_of_token in items.values() for item in items_of_token),
        default=1,
    )
    queues = {token: deque(items_of_token) for token, items_of_token in items.items()}
    rows = [
        _row(n, host_ids[n], host_valid[n], queues, units, separators)
        for n in range(host_ids.shape[0])
    ]
    unplaced = sum(map(len, queues.values()))
    if unplaced:
        raise UserError(
            f"model: {unplaced} images or videos of the batch have no placeholder in their prompts; valid: the image "
            "token of the checkpoint's config.json, and a template that writes it for each of them"
        )

    def stack(name: str, filler: int = 0) -> Tensor:
        columns = [getattr(row, name) for row in rows]
        width = max(len(column) for column in columns)
        padded = np.full((len(rows), width, *columns[0].shape[1:]), filler, dtype=columns[0].dtype)
        for column, target in zip(columns, padded, strict=True):
            target[: len(column)] = column
        return torch.from_numpy(padded).to(ids.device)

    return Layout(
        valid=valid,
        visual=stack("visual"),
        counts=tuple(len(row.visual) for row in rows),
        text=tuple(row.length - len(row.visual) for row in rows),
        special=tuple(row.length - len(row.visual) - len(row.words) for row in rows),
        words=stack("words", -1),
        grid=stack("grid"),
        picture=stack("picture"),
        tile=stack("tile"),
        source=stack("source"),
        share=stack("share") if units > 1 else None,
        blended=tuple(row.blended for row in rows),
        work=tuple(row.work for row in rows),
    )


@dataclass(frozen=True, eq=False)
class _LayoutRow:
    """One row of a layout, before padding; in numpy arrays, which are several times faster for many small steps."""

    length: int
    words: np.ndarray
    visual: np.ndarray
    grid: np.ndarray
    picture: np.ndarray
    tile: np.ndarray
    source: np.ndarray
    share: np.ndarray
    blended: bool
    work: Work


def _row(
    number: int,
    ids: np.ndarray,
    valid: np.ndarray,
    queues: Mapping[int, deque[VisualItem]],
    units: int,
    separators: Separators,
) -> _LayoutRow:
    """Take the row's images and videos from the queues and find their positions."""
    placed: list[tuple[np.ndarray, VisualItem]] = []
    words = valid
    for token, queue in queues.items():
        placeholder = ids == token
        words = words & ~placeholder
        places = (placeholder & valid).nonzero()[0]
        start = 0
        while queue and start + len(queue[0]) <= len(places) and start < len(places):
            item = queue.popleft()
            placed.append((places[start : start + len(item)], item))
            start += len(item)
        if start != len(places):
            raise UserError(
                f"chat {number} of the batch has {len(places)} placeholders where its images or videos fill {start}"
            )
    # Images come before videos in the queues; in the prompt they may alternate.
    placed.sort(key=lambda entry: int(entry[0][0]))
    row_items = [item for _, item in placed]
    grids, image = [np.zeros((0, 4), dtype=np.int64)], 0
    work = Work()
    for item in row_items:
        grid = item.grid.numpy()
        grids.append(grid + np.array([image, 0, 0, 0]))
        image += int(grid[-1, 0]) + 1
        work = work.plus(item.work)
    prunable = np.concatenate([np.ones(0, dtype=bool), *map(_prunable, row_items)])
    if separators == "candidates":
        prunable[:] = True

    def join(parts: list[np.ndarray], like: np.ndarray) -> np.ndarray:
        joined: np.ndarray = np.concatenate([like, *parts])[prunable]
        return joined

    no_slots = np.zeros(0, dtype=np.int64)
    tiles = [item.grid[:, 1] if item.tile is None else item.tile for item in row_items]
    return _LayoutRow(
        length=int(valid.sum()),
        words=words.nonzero()[0],
        visual=join([places for places, _ in placed], no_slots),
        grid=np.concatenate(grids)[prunable],
        picture=join([np.full(len(item), n) for n, item in enumerate(row_items)], no_slots),
        tile=join([tile.numpy() for tile in tiles], no_slots),
        source=join(
            [_pad_units(item.source.numpy(), units) for item in row_items],
            np.zeros((0, units), dtype=np.int64),
        ),
        share=join(
            [_unit_weights(item, units) for item in row_items],
            np.zeros((0, units), dtype=np.float32),
        ),
        blended=any(item.share is not None for item in row_items),
        work=work,
    )


def _prunable(item: VisualItem) -> np.ndarray:
    if item.prunable is None:
        return np.ones(len(item), dtype=bool)
    prunable: np.ndarray = item.prunable.numpy()
    return prunable


def _pad_units(table: np.ndarray, units: int) -> np.ndarray:
    if table.shape[1] == units:
        return table
    return np.pad(table, ((0, 0), (0, units - table.shape[1])))


def _unit_weights(item: VisualItem, units: int) -> np.ndarray:
    """Return the weights of an item's units; one unit each has weight 1."""
    if item.share is None:
        return _pad_units(np.ones((len(item), item.source.shape[1]), dtype=np.float32), units)
    return _pad_units(item.share.float().numpy(), units)


def mean_of_blocks(values: Tensor, units: int) -> Tensor:
    """Return (views * units^2, ...): of square views (views, patches, ...), the mean of the patches of each unit."""
    fold = math.isqrt(values.shape[1]) // units
    blocks = values.view(len(values), units, fold, units, fold, *values.shape[2:])
    return blocks.mean((2, 4)).flatten(0, 2)
