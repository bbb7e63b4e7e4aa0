"""DeepSeek-OCR: views with the pixels of its preprocessing, and their tokens; sizes of its config.json; its answers.

SAM, a convolution to 1/16 of its cells, and an encoder that reads the cells: of whole pictures, and of crops of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from transformers import (
    BatchFeature,
    DeepseekOcr2Processor,
    UnlimitedOcrImageProcessor,
    UnlimitedOcrProcessor,
)
from transformers.models.unlimited_ocr.image_processing_unlimited_ocr import (
    get_optimal_tiled_canvas,
)
from transformers.processing_utils import ImagesKwargs

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem
from espalier.harness.engine.model_parts import PixelGrids
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox, padded_box
from espalier.harness.settings import Count, Natural


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


def check_views(values: Mapping[str, Any]) -> None:
    """Raise UserError for values of `model.processor` that make no views; what is absent is the library's."""
    key = "model.processor"
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


class OwnViewsProcessor(DeepseekOcr2Processor):
    """The library's processor, without its values for crops, which would override those of `model.processor`."""

    images_kwargs = ImagesKwargs()
    skip_tensor_conversion = UnlimitedOcrProcessor.skip_tensor_conversion


#: Stem tokens along an edge that the convolution merges into one cell.
FOLD = 4


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
            tables = [self.plane(0, 1, 1, n_page, image * n_page**2)]
            if count:
                stitched = "patches_grid" in inputs
                columns, rows = inputs["patches_grid"][image] if stitched else (count, 1)
                tables.insert(0, self.plane(1, int(columns), int(rows), n_crop, first))
                first += count * n_crop**2
            grid, unit, tile = (torch.cat(parts) for parts in zip(*tables, strict=True))
            # The separator takes the place of one more newline, or query, at the end.
            grid, tile = torch.cat([grid, grid[-1:]]), torch.cat([tile, tile[-1:]])
            unit = torch.cat([unit, torch.tensor([-1])])
            source = unit.clamp(min=0).view(-1, 1)
            tiled = None if self.data.unplaced else tile
            items.append(VisualItem(grid, source, prunable=unit >= 0, tile=tiled, work=work))
        return {self.model.config.image_token_id: items}

    def plane(
        self, view: int, columns: int, rows: int, side: int, first: int
    ) -> tuple[Tensor, ...]:
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
        places = torch.cartesian_prod(torch.arange(rows * side), torch.arange(width + 1))
        row, column = places.unbind(1)
        tile = row // side * columns + column // side
        unit = first + tile * side**2 + row % side * side + column % side
        grid = torch.stack([torch.zeros_like(row), torch.full_like(row, view), row, column], dim=1)
        return grid, torch.where(column < width, unit, -1), (tile + 1) * view

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
        """Return the work of one view; windows at the border are padded to full size."""
        window = self.model.config.vision_config.sam_config.window_size
        cells, patches = self._cells(views), self._patches(views)
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


#: Sizes of the decoder, under the same names in the release's `language_config` and in the library.
TEXT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "moe_intermediate_size", "n_routed_experts"),
    *("num_experts_per_tok", "n_shared_experts", "mlp_layer_types", "first_k_dense_replace"),
)

#: Sizes of CLIP and of SAM in the library, and by what name the release's `vision_config.width` gives them.
TOWER = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": None,
}
STEM = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "mlp_dim": None,
    "global_attn_indexes": "global_attn_indexes",
}


def released_sizes(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sizes stated in the release's config.json, by the table of `model.architecture` that they replace."""
    width = _table(_table(config, "vision_config"), "width")
    clip, sam = _table(width, "clip-l-14-224"), _table(width, "sam_vit_b")
    qwen2 = _table(width, "qwen2-0-5b")  # DeepSeek-OCR 2's
    return {
        "text": _by_name(_table(config, "language_config"), {name: name for name in TEXT}),
        "vision": _by_name(clip, TOWER) | _by_name(qwen2, {"hidden_size": "dim"}),
        "stem": _by_name(sam, STEM),
    }


def library_sizes(config: Any) -> dict[str, dict[str, Any]]:
    """Return the sizes of a configuration of the library's class, by the same tables."""
    vision = config.vision_config
    parts = {
        "text": (config.text_config, TEXT),
        "vision": (vision.encoder_config, TOWER),
        "stem": (vision.sam_config, STEM),
    }
    return {
        name: {key: getattr(part, key) for key in keys if hasattr(part, key)}
        for name, (part, keys) in parts.items()
    }


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}


def _by_name(table: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        name: table[release_name]
        for name, release_name in names.items()
        if release_name is not None and release_name in table
    }


#: A label and its boxes; the label is the first group.
_REFERENCE = re.compile(r"<\|ref\|>(.*?)<\|/ref\|><\|det\|>.*?<\|/det\|>", re.DOTALL)
_DISPLAY = re.compile(r"\\\[.*?\\\]", re.DOTALL)
_NUMBER = re.compile(r"\\quad \([^)]*\)")
_GAP = re.compile(r"\n{3,4}")


def as_transformers(text: str) -> str:
    """Return an answer as written to a file by the release's transformers code.

    Pictures become markdown links, numbered from 0, with a line break; other labels and boxes are removed; two
    operators that markdown renderers lack are spelt out.
    """
    numbers = count()

    def link(match: re.Match[str]) -> str:
        return f"![](images/{next(numbers)}.jpg)\n" if match[1] == "image" else ""

    return _REFERENCE.sub(link, text).replace("\\coloneqq", ":=").replace("\\eqqcolon", "=:")


def as_vllm(text: str) -> str:
    """Return an answer as written for benchmarks by the release's vLLM code.

    All labels and boxes are removed, also centring tags and the numbers of displayed formulas; three or four line
    breaks become two.
    """
    text = _REFERENCE.sub("", text)
    text = _DISPLAY.sub(lambda match: _NUMBER.sub("", match[0]), text)
    return _GAP.sub("\n\n", text).replace("<center>", "").replace("</center>", "")


#: Functions by the value of `model.processor.clean_up`.
CLEAN_UPS: Mapping[str, Callable[[str], str]] = {
    "transformers": as_transformers,
    "vllm": as_vllm,
}
