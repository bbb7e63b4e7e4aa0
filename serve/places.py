"""Where an item's visual tokens are: places in the picture, units of the projector, positions in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

#: The fields of one picture or video as vLLM's processor makes them.
Fields = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Places:
    """One picture or video.

    Attributes:
        grid: (N, 4) frame, view, row and column of each token that may go, in sequence order.
        tile: (N,) crop that each lies in, 0 for a global view.
        units: inputs of the projector that the item takes.
        of_units: maps values (units, ...) to (N, ...): selects or blends them.
        blended: whether a token mixes several units.
        prunable: (T,) False for newline tokens, which always stay.
        positions: (T, 3) time, row and column relative to the item's start; where text stands between its tokens,
            relative to the start of each run of tokens.
        span: positions after which the prompt continues.
    """

    grid: Tensor
    tile: Tensor
    units: int
    of_units: Callable[[Tensor], Tensor]
    blended: bool
    prunable: Tensor
    positions: Tensor
    span: int


def item(
    grid: Tensor,
    *,
    tile: Tensor | None = None,
    units: int | None = None,
    of_units: Callable[[Tensor], Tensor] = lambda values: values,
    blended: bool = False,
    prunable: Tensor | None = None,
    positions: Tensor | None = None,
) -> Places:
    """Return places of a grid; by default a unit for each token, and positions on one axis."""
    prunable = torch.ones(len(grid), dtype=torch.bool) if prunable is None else prunable
    total = len(prunable)
    if positions is None:
        positions = torch.arange(total).unsqueeze(1).expand(-1, 3)
    return Places(
        grid=grid,
        tile=grid[:, 1] if tile is None else tile,
        units=total if units is None else units,
        of_units=of_units,
        blended=blended,
        prunable=prunable,
        positions=positions,
        span=int(positions.max()) + 1,
    )


def rectangle(frames: int, rows: int, columns: int, view: int = 0) -> Tensor:
    """Return (frames * rows * columns, 4) places of full grids in raster order."""
    axes = (torch.arange(frames), torch.tensor([view]), torch.arange(rows), torch.arange(columns))
    return torch.cartesian_prod(*axes)


def among_words(places: Places, embedded: Tensor) -> tuple[Tensor, int]:
    """Return the positions (L, 3) of an item with text between its tokens, and its span.

    Args:
        places: of the item.
        embedded: (L,) True for visual tokens, False for words.
    """
    positions = torch.zeros(len(embedded), 3, dtype=torch.long)
    start = token = end = 0
    for visual, run in groupby(embedded.tolist()):
        length = len(list(run))
        block = slice(start, start + length)
        if visual:
            local = places.positions[token : token + length]
            token += length
        else:
            local = torch.arange(length).unsqueeze(1).expand(-1, 3)
        positions[block] = end + local
        end += int(local.max()) + 1
        start += length
    return positions, end


@dataclass(frozen=True, eq=False)
class Tower:
    """The vision tower as vLLM has built it.

    Attributes:
        layers: attention of the built layers; the projector reads the last one.
        compiled: modules of the model that vLLM may have compiled.
        depth: layers of the checkpoint; vLLM may build fewer.
        class_tokens: 1 if a class token stands before the patches.
        entry: the first module that gets the projector's input; a compiled one runs no hooks.
        projector: maps that input to the decoder's width.
        square: patches that the projector concatenates to a unit.
        to_units: maps values (images, patches, ...) of one call to (units, ...).
    """

    layers: Sequence[nn.Module]
    compiled: Sequence[nn.Module]
    depth: int
    class_tokens: int
    entry: nn.Module
    projector: nn.Module
    square: int
    to_units: Callable[[Tensor], Tensor]
    flat: bool = False

    def number(self, layer: int | None) -> int:
        """Return the number of a layer, counted from 0; None: the one that the projector reads."""
        return len(self.layers) - 1 if layer is None else layer % self.depth

    def features(self, entering: Tensor) -> Tensor:
        """Return the projector's input as (units, D)."""
        return entering.reshape(-1, self.square * entering.shape[-1])

    def project(self, features: Tensor) -> Tensor:
        """Project (units, D) features to (units, D_text)."""
        shape = (len(features) * self.square, -1)
        patches = features.reshape(*shape) if self.flat else features.reshape(shape[0], 1, -1)
        projected: Tensor = self.projector(patches)
        return projected.reshape(len(features), -1)
