"""Positions of text and visual tokens, where the library's rule differs from the release's or depends on the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

#: Token types of the library's processors.
TEXT, IMAGE, VIDEO = range(3)


def released_positions(
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    second_per_grid_ts: Any = None,
    *,
    side: int,
    pace: float | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return time, height and width of each token, and the next token's position minus the row's length.

    It replaces the library's `get_rope_index` and has the same first arguments.

    Args:
        input_ids: (B, L).
        mm_token_type_ids: (B, L) TEXT, IMAGE or VIDEO.
        image_grid_thw: (images, 3) frames, rows and columns of patches.
        video_grid_thw: (videos, 3), the same.
        attention_mask: (B, L) 0 for padding, which gets position 0.
        second_per_grid_ts: seconds between frames of `video_grid_thw`, for each video; None: one second.
        side: patches along the edge of a visual token.
        pace: position steps per second of a video; None: one step per frame.
        **kwargs: other arguments of `generate`, ignored.

    Returns:
        positions: (3, B, L).
        deltas: (B, 1).

    Raises:
        ValueError: the number of placeholders does not match the pictures.
    """
    blocks = {
        IMAGE: _blocks(image_grid_thw, side, None, None),
        VIDEO: _blocks(video_grid_thw, side, second_per_grid_ts, pace),
    }
    kinds = mm_token_type_ids.cpu()
    valid = torch.ones_like(kinds) if attention_mask is None else attention_mask.cpu()
    positions = torch.zeros(3, *kinds.shape, dtype=input_ids.dtype)
    deltas = []
    for row, real in enumerate(valid.bool()):
        places = _row(kinds[row, real].tolist(), blocks)
        positions[:, row, real] = places
        deltas.append([int(places.max()) + 1 - places.shape[1]])
    device = input_ids.device
    return positions.to(device), torch.tensor(deltas, device=device)


def _row(kinds: list[int], blocks: dict[int, Iterator[Tensor]]) -> Tensor:
    """Return the positions (3, T) of one prompt's tokens."""
    parts, start = [], 0
    for run_kind, run in groupby(kinds):
        remaining = len(list(run))
        while remaining > 0:
            # Adjacent pictures form one run.
            block = (
                torch.arange(remaining).expand(3, -1)
                if run_kind == TEXT
                else next(blocks[run_kind], None)
            )
            if block is None or block.shape[1] > remaining:
                raise ValueError(f"{remaining} placeholders are left for which there is no picture")
            parts.append(block + start)
            remaining -= block.shape[1]
            start = int(parts[-1].max()) + 1
    return torch.cat(parts, 1)


def _blocks(grids: Tensor | None, side: int, seconds: Any, pace: float | None) -> Iterator[Tensor]:
    """Yield the positions (3, T) of each picture or video, relative to its start."""
    shapes = [] if grids is None else grids.tolist()
    for number, (frames, rows, columns) in enumerate(shapes):
        time = torch.arange(frames)
        if pace is not None:
            step = 1.0 if seconds is None else float(seconds[number])
            # Single precision, factor by factor, truncated: as the released code rounds time.
            time = (time * step * pace).long()
        axes = (time, torch.arange(rows // side), torch.arange(columns // side))
        yield torch.cartesian_prod(*axes).T


def row_positions(
    rule: Callable[..., tuple[Tensor, Tensor]],
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return positions (4, B, L) and deltas (B, 1) by the library's `rule`, row by row.

    transformers 5.23 continues the number of the picture from row to row, so that an answer would depend on the batch;
    the release's code runs rows alone.

    Args:
        rule: the library's `get_rope_index`.
        input_ids: (B, L).
        mm_token_type_ids: (B, L) 1 for placeholders.
        image_grid_thw: (pictures, 3) frames, rows and columns of patches.
        attention_mask: (B, L) 0 for padding.
        **kwargs: other arguments of `generate`, ignored.
    """
    # The marks around a picture separate it from the next.
    starts = mm_token_type_ids.diff(dim=1, prepend=mm_token_type_ids[:, :1] * 0) == 1
    counts = starts.sum(1).tolist()
    grids = [None] * len(counts) if image_grid_thw is None else image_grid_thw.split(counts)
    results = []
    for row, grid in enumerate(grids):
        place = slice(row, row + 1)
        mask = None if attention_mask is None else attention_mask[place]
        results.append(rule(input_ids[place], mm_token_type_ids[place], grid, mask))
    positions, deltas = zip(*results, strict=True)
    return torch.cat(positions, 1), torch.cat(deltas)
