"""Towers that keep patches in raster order and projectors that join squares of them.

The patches of a square lie apart in the projector's input, so units are patches, and a token is the mean of a square:
in features at a `vision` site, and in signals of the tower. Merged tokens are made of projected ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.engine.model_parts import coarse
from espalier.harness.models.adapter import Adapter


class RasterPatchesAdapter(Adapter):
    """Pictures of any size as one list of patches; a family states what a square of them becomes."""

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on all pictures in the order of their placeholders."""
        return self.run_processor(texts, images=list(chain(*pictures)) or None)

    def grids(self, inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return rows and columns of patches of each picture of a batch."""
        shapes = inputs["image_grid_thw"].tolist() if "image_grid_thw" in inputs else []
        return [(rows, columns) for _, rows, columns in shapes]

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture."""
        items: list[VisualItem] = []
        first = 0
        for rows, columns in self.grids(inputs):
            items.append(self.picture_item(rows, columns, first))
            first += rows * columns
        return {self.model.config.image_token_id: items}

    def picture_item(self, rows: int, columns: int, first: int) -> VisualItem:
        """Return the item of a picture of rows x columns patches, the first of them number `first`.

        Default: squares of patches in raster order, each a token.
        """
        side = self.model.config.vision_config.spatial_merge_size
        source, patches = squares(rows, columns, side, first), rows * columns
        share = torch.full(source.shape, side**-2)
        work = Work(tokens=patches, pairs=patches**2, units=len(source))
        return VisualItem(rectangle(1, rows // side, columns // side), source, share, work=work)

    def coarse_inputs(self, inputs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return inputs with coarse pictures, which the processor has cut into patches (P, 3, p, p) or (P, 3 p p)."""
        grids = self.grids(inputs)
        if not grids:
            return dict(inputs)
        pixels = inputs["pixel_values"]
        edge = self.model.config.vision_config.patch_size
        parts = pixels.view(-1, 3, edge, edge).split([rows * columns for rows, columns in grids])
        pairs = zip(parts, grids, strict=True)
        patches = torch.cat([_coarse(part, *grid, share) for part, grid in pairs])
        return {**inputs, "pixel_values": patches.view(pixels.shape)}


def squares(rows: int, columns: int, side: int, first: int) -> Tensor:
    """Return (tokens, side^2): the patches of each square in raster order, numbered from `first`."""
    patches = torch.arange(first, first + rows * columns)
    blocks = patches.view(rows // side, side, columns // side, side).transpose(1, 2)
    return blocks.reshape(-1, side**2)


def _coarse(patches: Tensor, rows: int, columns: int, share: float) -> Tensor:
    """Return the patches (rows columns, C, p, p) of one picture, made coarse."""
    cut = patches.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4)
    picture = coarse(cut.flatten(3, 4).flatten(1, 2), share)
    return picture.view(cut.shape).permute(1, 3, 0, 2, 4).reshape(patches.shape)
