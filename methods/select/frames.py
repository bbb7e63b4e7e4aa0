"""Frames of videos: which frames follow each other, and how alike a token is to the one at the same place before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.checks import read
from espalier.methods.select.topk import rows_of

#: First and last frame of each part of a video, in order.
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Frames:
    """The partition of the tokens by frame; a clip is a run of frames with tokens at the same places.

    Tables of frames have N columns, one for each frame there could be; absent frames have size 0.

    Attributes:
        index: (B, N) running number of each token's frame.
        size: (B, N) tokens of each frame.
        start: (B, N) first token of each frame.
        place: (B, N) number of each frame in its clip.
        length: (B, N) frames of each frame's clip.
    """

    index: Tensor
    size: Tensor
    start: Tensor
    place: Tensor
    length: Tensor

    @classmethod
    def of(cls, grid: Tensor) -> Frames:
        """Read off coordinates (B, N, 4): image or frame, view, row, column. Cost: O(N), no Python loop.

        A video cannot be distinguished from consecutive images of one size, or from the next video of the same size.
        """
        token = torch.arange(grid.shape[1], device=grid.device).expand(grid.shape[:2])
        frame = grid[:, :, 0]
        changes = torch.zeros_like(token)
        changes[:, 1:] = frame[:, 1:] != frame[:, :-1]
        index = changes.cumsum(dim=1)
        size = torch.zeros_like(token).scatter_add(1, index, torch.ones_like(token))
        start = size.cumsum(dim=1) - size

        partner = (token - before(size, 1).gather(1, index)).clamp(min=0)
        moved = (grid[:, :, 1:] != grid[rows_of(partner), partner, 1:]).any(dim=2)
        different = torch.zeros_like(token).scatter_add(1, index, moved.long())
        follows = (different == 0) & (size == before(size, 1))
        follows[:, 0] = False
        # An absent frame opens a clip of its own, so that it adds to the length of no other.
        opening = torch.where(follows & (size > 0), 0, token).cummax(dim=1).values
        length = torch.zeros_like(token).scatter_add(1, opening, torch.ones_like(token))
        return cls(index, size, start, token - opening, length.gather(1, opening))

    def in_windows(self, back: Sequence[int], last_whole: bool) -> Tensor:
        """Return (B, N) how many frames back each frame is compared; 0 for frames that stay whole or are absent.

        Args:
            back: the same for each frame of a window, which start anew with every clip.
            last_whole: as DyCoke's released code: window starts run to F - 5, so that the third frame of a clip's last
                window is never compared, nor any frame of a clip of one window.
        """
        window = len(back)
        number = self.place % window
        frames_back = torch.tensor(back, device=number.device)[number]
        if last_whole:
            last = (number == 2) & (self.place - 2 >= self.length - window)
            frames_back = torch.where(last | (self.length <= window), 0, frames_back)
        return torch.where(self.size > 0, frames_back, 0)

    def likeness(self, tokens: Tensor, back: Tensor) -> Tensor:
        """Return (B, N) cosines, in fp32, with the token at the same place `back` (B, N) frames earlier.

        1 for a frame that is not compared (`back` is 0). Cost: O(N D).
        """
        token = torch.arange(tokens.shape[1], device=tokens.device)
        earlier = (self.index - back.gather(1, self.index)).clamp(min=0)
        partner = token - self.start.gather(1, self.index) + self.start.gather(1, earlier)
        partner = torch.where(back.gather(1, self.index) > 0, partner, token)
        units = normalize(tokens.float(), dim=-1)
        return (units * units[rows_of(partner), partner]).sum(dim=2)


class ClipSpan(NamedTuple):
    """One video of a row, or one picture: frames of one size.

    Attributes:
        span: its tokens.
        frames: how many frames it has.
        keep: its share of the row's budget, in proportion to its tokens.
    """

    span: slice
    frames: int
    keep: int

    def of(self, values: Tensor) -> Tensor:
        """Return (frames, n, ...) of a row's values (N, ...), in fp32."""
        return values[self.span].float().reshape(self.frames, -1, *values.shape[1:])


def clips(grid: Tensor, keep: int) -> list[list[ClipSpan]]:
    """Return the clips of each row of coordinates (B, N, 4), which share `keep` tokens. Waits for the device once."""
    frames = Frames.of(grid)
    quotas = spread(frames.size, frames.size.new_full((len(grid), 1), keep))
    rows = []
    for places, sizes, shares in torch.stack(read(frames.place, frames.size, quotas), 1).tolist():
        openings = [n for n, place in enumerate(places) if place == 0 and sizes[n] > 0]
        row, start = [], 0
        for first, last in pairwise((*openings, len(sizes))):
            n_frames, end = (
                sum(size > 0 for size in sizes[first:last]),
                start + sum(sizes[first:last]),
            )
            row.append(ClipSpan(slice(start, end), n_frames, sum(shares[first:last])))
            start = end
        rows.append(row)
    return rows


def before(values: Tensor, steps: int) -> Tensor:
    """Return (B, N) `values` of the frame `steps` before each, 0 for the first ones."""
    return torch.nn.functional.pad(values, (steps, 0))[:, : values.shape[1]]


def spread(sizes: Tensor, total: Tensor) -> Tensor:
    """Return (B, N) integers with sum `total` (B, 1): the same share of each size, rounded up or down.

    Rounding up is spread evenly over the row: the running sums are rounded down, not the shares.
    A row of zeros gets zeros. `total` must lie between 0 and the sum of the sizes.
    """
    upto = sizes.cumsum(dim=1)
    total_size = upto[:, -1:].clamp(min=1)
    return total * upto // total_size - total * (upto - sizes) // total_size
