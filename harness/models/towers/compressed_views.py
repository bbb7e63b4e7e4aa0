"""SAM, a convolution to 1/16 of its cells, and an encoder that reads the cells: whole pictures, and crops of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem
from espalier.harness.engine.model_parts import PixelGrids
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox, padded_box

#: Stem tokens along an edge that the convolution merges into one cell.
FOLD = 4


def plane(view: int, columns: int, rows: int, side: int, first: int) -> tuple[Tensor, ...]:
    """Return the tokens of one view: cells row by row across its tiles, and a newline after each row.

    Args:
        view: 0 for the global view, 1 for the crops.
        columns: tiles along the width.
        rows: tiles along the height.
        side: cells along the edge of a tile.
        first: projector unit of the first tile's first cell.

    Returns:
        grid (n, 4), unit (n,) with -1 for newlines, tile (n,), where n = rows side (columns side + 1).
    """
    width = columns * side
    row, column = torch.cartesian_prod(torch.arange(rows * side), torch.arange(width + 1)).unbind(1)
    tile = row // side * columns + column // side
    unit = first + tile * side**2 + row % side * side + column % side
    grid = torch.stack([torch.zeros_like(row), torch.full_like(row, view), row, column], dim=1)
    return grid, torch.where(column < width, unit, -1), (tile + 1) * view


def view_work(cells: int, patches: int, window: int) -> Work:
    """Return the work of a view; windows at the border are padded to full size.

    Args:
        cells: cells along the edge of the view.
        patches: stem tokens along the edge of the view.
        window: stem tokens along the edge of a window.
    """
    tokens, windows = cells**2 + 1, -(-patches // window)
    filled = (windows * window) ** 2
    return Work(
        tokens=tokens,
        pairs=tokens**2,
        units=cells**2,
        stem_tokens=patches**2,
        stem_pairs=patches**4,
        stem_window_pairs=windows**2 * window**4,
        stem_window_tokens=filled,
        stem_lines=patches**2 * 2 * patches,
        stem_window_lines=filled * 2 * window,
    )


class CompressedViewsAdapter(Adapter):
    """Crops stitched to one plane (view 1), then the global view (view 0).

    Each row of cells ends with a newline token and the image with a separator; both are never pruned.
    """

    def stem_layers(self) -> Sequence[Any]:
        """Return SAM's layers."""
        return cast("Sequence[Any]", self.model.model.vision_tower.sam_encoder.layers)

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image: crops, then the global view. The projector gets all global views first."""
        items: list[VisualItem] = []
        pages = inputs.get("pixel_values", ())
        # A batch without crops has no such pixels; its counts are 0.
        crops = inputs.get("pixel_values_local", pages)
        first = self._cells(pages) ** 2 * len(pages) if len(pages) else 0
        for image in range(len(pages)):
            count, work = int(inputs["num_local_patches"][image]), self._work(pages)
            for _ in range(count):
                work = work.plus(self._work(crops))
            n_page, n_crop = self._cells(pages), self._cells(crops)
            tables = [self._page(n_page, image * n_page**2)]
            if count:
                stitched = "patches_grid" in inputs
                columns, rows = inputs["patches_grid"][image] if stitched else (count, 1)
                tables.insert(0, self._plane(int(columns), int(rows), n_crop, first))
                first += count * n_crop**2
            grid, unit, tile = (torch.cat(parts) for parts in zip(*tables, strict=True))
            # The separator takes the place of one more newline, or query, at the end.
            grid, tile = torch.cat([grid, grid[-1:]]), torch.cat([tile, tile[-1:]])
            unit = torch.cat([unit, torch.tensor([-1])])
            source = unit.clamp(min=0).view(-1, 1)
            tiled = None if self.data.unplaced else tile
            items.append(VisualItem(grid, source, prunable=unit >= 0, tile=tiled, work=work))
        return {self.model.config.image_token_id: items}

    def _page(self, side: int, first: int) -> tuple[Tensor, ...]:
        """Return places, units and tiles of the tokens of a global view; its first unit is `first`."""
        return plane(0, 1, 1, side, first)

    def _plane(self, columns: int, rows: int, side: int, first: int) -> tuple[Tensor, ...]:
        """Return places, units and tiles of the tokens of an image's crops; their first unit is `first`."""
        return plane(1, columns, rows, side, first)

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the padded square of the global view if it is padded; crops are stretched to fill their plane."""
        images = self.processor.image_processor
        stretched = not images.crop_to_patches and (
            images.size["height"] <= images.maximum_pad_value
        )
        return WHOLE if view.index or stretched else padded_box(view)

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return all global views, then all crops."""
        names = ("pixel_values", "pixel_values_local")
        views = [inputs[name] for name in names if name in inputs]
        side = FOLD * int(self.model.config.vision_config.sam_config.patch_size)
        return PixelGrids(views, [self._cells(pixels) for pixels in views], side, *self.colours())

    def _cells(self, views: Tensor) -> int:
        """Return the number of cells along an edge of (views, 3, S, S) pixels."""
        return -(-self._patches(views) // FOLD)

    def _patches(self, views: Tensor) -> int:
        """Return the number of stem tokens along an edge."""
        return int(views.shape[-1]) // int(self.model.config.vision_config.sam_config.patch_size)

    def _work(self, views: Tensor) -> Work:
        """Return the work of one view."""
        window = self.model.config.vision_config.sam_config.window_size
        return view_work(self._cells(views), self._patches(views), window)
