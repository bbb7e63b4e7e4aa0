"""DeepSeek-OCR's views of an image, global view and crops: their pixels and the positions of their cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from transformers import BatchFeature, UnlimitedOcrImageProcessor
from transformers.models.unlimited_ocr.image_processing_unlimited_ocr import (
    get_optimal_tiled_canvas,
)

from espalier.harness.cost.facts import Work
from espalier.harness.errors import UserError
from espalier.harness.settings import Count, Natural, gather


@dataclass(frozen=True)
class ViewSize:
    """Pixels of the global view, which is square."""

    height: Count
    width: Count


#: Valid keys of `model.processor`, and the type of each.
SETTINGS: Mapping[str, Any] = {
    "size": ViewSize,
    **dict.fromkeys(("image_mean", "image_std"), tuple[float, ...]),
    "maximum_pad_value": Natural,
    "crop_to_patches": bool,
    **dict.fromkeys(("tile_size", "min_patches", "max_patches"), Count),
}


def check_views(processor: Mapping[str, Any]) -> None:
    """Raise UserError for a value of `model.processor` that makes no views; what is absent is the library's."""
    key = "model.processor"
    values = gather(
        {
            name: (f"{key}.{name}", processor[name], hint)
            for name, hint in SETTINGS.items()
            if name in processor
        }
    )
    size, fewest, limit = (values.get(name) for name in ("size", "min_patches", "max_patches"))
    if size is not None and size.height != size.width:
        raise UserError(
            f"{key}.size.width={size.width}: views are square; valid: {size.height}, as size.height"
        )
    if fewest is not None and limit is not None and fewest > limit:
        raise UserError(
            f"{key}.min_patches={fewest} is above max_patches={limit}; valid: at most {limit}"
        )
    for name in ("image_mean", "image_std"):
        if len(values.get(name, "RGB")) != len("RGB"):
            raise UserError(f"{key}.{name}={[*values[name]]} must be three numbers, of R, G and B")


class OcrImageProcessor(UnlimitedOcrImageProcessor):
    """The library's processor for the same architecture, with the pixels of DeepSeek-OCR's preprocessing.

    Cropping, choice of the grid, stretching, grey padding and normalisation are the same. Different are the resampling
    (Pillow's; torchvision's differs by up to 2 of 255 levels), the size of a padded image if its exact value ends in
    one half, and the side of an odd row of padding.
    """

    # The library's classes spell out the options, and differ in which.
    def _preprocess(self, images: list[Tensor], **options: Any) -> BatchFeature:  # type: ignore[override]
        """Return the views of (3, H, W) images: `pixel_values` (images, 3, S, S), and crops in raster order."""
        wholes, crops, counts, grids = [], [], [], []
        for image in images:
            picture = to_pil_image(image)
            wholes.append(self._finished(_global_view(picture, options), options))
            columns, rows, cut = _crops(picture, options)
            crops += [self._finished(crop, options) for crop in cut]
            counts.append(len(cut))
            grids.append([columns, rows])
        views = {"pixel_values": wholes, **({"pixel_values_local": crops} if crops else {})}
        return BatchFeature(
            data={**views, "num_local_patches": counts, "patches_grid": grids},
            tensor_type=options["return_tensors"],
            skip_tensor_conversion=self.skip_tensor_conversion,
        )

    def _finished(self, view: Image.Image, options: dict[str, Any]) -> Tensor:
        """Return normalised pixels."""
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        pixels: Tensor = self.rescale_and_normalize(
            pil_to_tensor(view).unsqueeze(0), *(options[name] for name in names)
        )
        return pixels.squeeze(0)


def _global_view(picture: Image.Image, options: dict[str, Any]) -> Image.Image:
    """Return the global view: stretched in small modes without crops, otherwise padded with grey."""
    side = options["size"].height
    if not options["crop_to_patches"] and side <= options["maximum_pad_value"]:
        return picture.resize((side, side), Image.Resampling.BICUBIC)
    return ImageOps.pad(picture, (side, side), Image.Resampling.BICUBIC, color=(127, 127, 127))


def _crops(picture: Image.Image, options: dict[str, Any]) -> tuple[int, int, list[Image.Image]]:
    """Return columns, rows and crops in raster order; an image that fits into one crop has no crops."""
    side = options["tile_size"]
    if not options["crop_to_patches"] or max(picture.size) <= side:
        return 1, 1, []
    columns, rows = get_optimal_tiled_canvas(
        (picture.height, picture.width),
        (side, side),
        options["min_patches"],
        options["max_patches"],
    )
    canvas = picture.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    return columns, rows, [canvas.crop((x, y, x + side, y + side)) for x, y in corners]


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
