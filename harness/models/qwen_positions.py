"""Positions of a prompt of Qwen2-VL and Qwen2.5-VL, by the rule of both releases.

Text continues after the largest position before it, including the time axis of a video. transformers 5.3 to 5.23
continues after a video's height and width only, so that text and late frames share positions.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    del kwargs
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
