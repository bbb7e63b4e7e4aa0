"""What an adapter says about one image or video: its placeholders, and what they cost before the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Work(NamedTuple):
    """What one row of a batch costs before the decoder; pairs are attended pairs of tokens in one layer.

    Attributes:
        tokens: tokens that the vision tower processes.
        pairs: pairs in a layer with attention inside each image or frame.
        window_pairs: pairs in a layer with attention inside windows (0: the tower has none).
        units: what the projector maps, one by one, to visual tokens.
        stem_tokens: tokens of the stack that runs before the tower (DeepSeek-OCR's SAM), 0 elsewhere.
        stem_pairs: its pairs in a global layer.
        stem_window_pairs: its pairs in a windowed layer.
        stem_window_tokens: tokens that attention goes through in a windowed layer, windows filled up at the border.
        stem_lines: pairs of a token and a row or column of tokens that it sees, in a global layer (relative positions).
        stem_window_lines: the same in a windowed layer.
        extra_tokens: tokens of tower layers that ran for a method alone (the projector does not read them), summed over
            these layers.
        extra_pairs: their pairs.
        reprojected: units that went through the projector a second time, after merging.
        spared_attention: tokens that a method inside the tower took from attentions, summed over its layers.
        spared_mlp: tokens that it took from MLPs, likewise.
        spared_pairs: attended pairs that it took, likewise.
    """

    tokens: int = 0
    pairs: int = 0
    window_pairs: int = 0
    units: int = 0
    stem_tokens: int = 0
    stem_pairs: int = 0
    stem_window_pairs: int = 0
    stem_window_tokens: int = 0
    stem_lines: int = 0
    stem_window_lines: int = 0
    extra_tokens: int = 0
    extra_pairs: int = 0
    reprojected: int = 0
    spared_attention: int = 0
    spared_mlp: int = 0
    spared_pairs: int = 0

    def plus(self, other: Work) -> Work:
        """Add entry by entry."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def untouched(self) -> Work:
        """Return what the same row costs without a method."""
        return self._replace(
            reprojected=0,
            extra_tokens=0,
            extra_pairs=0,
            spared_attention=0,
            spared_mlp=0,
            spared_pairs=0,
        )


NO_WORK = Work()


@dataclass(frozen=True, eq=False)
class Item:
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
    """Return (images * height * width, 4) coordinates of whole grids in raster order, image by image."""
    axes = (torch.arange(images), torch.tensor([view]), torch.arange(height), torch.arange(width))
    return torch.cartesian_prod(*axes)
