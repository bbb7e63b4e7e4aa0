"""How video frames are pooled: which projector units each token of a frame blends, read off the model's own pooling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from espalier.harness.cost.row_work import Work
from espalier.harness.engine.visual_items import Item, rectangle

#: Units that one token can blend: both published rules look at two rows and two columns.
TAPS = 4


@dataclass(frozen=True, eq=False)
class Pooling:
    """What one frame of `units` projector units becomes.

    Attributes:
        units: projector units of a frame.
        side: rows, and columns, of its tokens.
        source: (side * side, S) units of the frame that each token blends.
        share: (side * side, S) their weights.
    """

    units: int
    side: int
    source: Tensor
    share: Tensor

    @classmethod
    def measure(cls, pool: Callable[[Tensor], Tensor], units: int) -> Pooling:
        """Read the rule off a function from (frames, units, C) to (frames, tokens, C).

        It is linear, so unit vectors in place of features come out as the weights. Cost: one frame of C = `units`.
        """
        weights = pool(torch.eye(units, dtype=torch.float64)[None])[0]
        share, source = weights.topk(min(TAPS, units), dim=1)
        return cls(units=units, side=isqrt(len(weights)), source=source, share=share)

    def item(self, frames: int, first: int, row_newlines: bool) -> Item:
        """Describe a video: the frames in order, each in raster order.

        Args:
            frames: their number.
            first: number of the video's first projector unit; frame follows frame.
            row_newlines: whether a newline token ends each row of each frame, or a single one the whole video.
        """
        if row_newlines:
            grid = rectangle(frames, self.side, self.side + 1)
            prunable = grid[:, 3] < self.side
        else:
            end = torch.tensor([[frames - 1, 0, self.side, 0]])
            grid = torch.cat([rectangle(frames, self.side, self.side), end])
            prunable = grid[:, 2] < self.side
        source = torch.full((len(grid), self.source.shape[1]), first)
        share = torch.zeros(source.shape, dtype=self.share.dtype)
        offset = first + self.units * torch.arange(frames).view(-1, 1, 1)
        source[prunable] = (self.source + offset).flatten(0, 1)
        share[prunable] = self.share.repeat(frames, 1)
        n = frames * self.units
        work = Work(tokens=n, pairs=n * self.units, units=n)
        return Item(grid=grid, source=source, share=share, prunable=prunable, work=work)
