"""DeepSeek-OCR: SAM, a convolution to 1/16 of the cells, CLIP, one linear layer, and a mixture-of-experts decoder.

transformers has no class of this name; its class for Unlimited-OCR has the same modules and tensor names. It differs
in the decoder's attention, which the configuration built here sets to full attention in every layer. Answers are
cleaned up before scoring as in the releases' code.

DeepSeek-OCR 2 (arXiv 2601.20552) has Qwen2 0.5B as an encoder in place of CLIP. It reads the cells of a view, which all
see one another, and after them as many learned queries; a query sees all cells and the queries up to itself. The
projector maps the queries alone: visual tokens have an order, and no place in the picture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any, cast

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from transformers import (
    BatchFeature,
    DeepseekOcr2Config,
    DeepseekOcr2ForConditionalGeneration,
    DeepseekOcr2Processor,
    UnlimitedOcrConfig,
    UnlimitedOcrForConditionalGeneration,
    UnlimitedOcrImageProcessor,
    UnlimitedOcrProcessor,
)
from transformers.models.unlimited_ocr.image_processing_unlimited_ocr import (
    get_optimal_tiled_canvas,
)
from transformers.processing_utils import ImagesKwargs

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.engine.model_parts import PixelGrids
from espalier.harness.errors import UserError, unknown_name
from espalier.harness.models.adapter import Adapter, FamilyData
from espalier.harness.models.conversations import PLAIN, join_of
from espalier.harness.models.loader import config_of, load_part
from espalier.harness.models.random_weights import (
    Built,
    of,
    text_config,
    the_tokenizer,
    token_id,
    vision_config,
)
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox, padded_box
from espalier.harness.settings import Count, Natural
from espalier.harness.specs.run_spec import ModelSpec


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


#: Stem tokens along an edge that the convolution merges into one cell.
FOLD = 4


def full_layers(**text: Any) -> dict[str, Any]:
    """Return the arguments of a decoder with full attention in all layers."""
    return {**text, "layer_types": ["full_attention"] * text["num_hidden_layers"]}


def ocr_config(config_class: Any, encoder: Built, decoder: Callable[..., dict[str, Any]]) -> Built:
    """Return how a configuration of SAM, an encoder and a decoder of experts is built.

    Args:
        config_class: class of the configuration.
        encoder: sizes of the encoder.
        decoder: adds the types of the decoder's layers to its sizes.
    """
    stem = {
        "hidden_size": of("facts.stem.hidden"),
        "mlp_dim": of("facts.stem.intermediate"),
        "num_hidden_layers": of("facts.stem.layers"),
        "num_attention_heads": of("facts.stem.heads"),
    }
    vision = {
        "sam_config": Built(dict, stem, ("architecture.stem",)),
        "encoder_config": encoder,
    }
    arguments = {
        "vision_config": Built(dict, vision),
        "text_config": replace(
            text_config(n_routed_experts=of("facts.text.experts")), part_class=decoder
        ),
        "image_token_id": token_id("<image>"),
    }
    return Built(config_class, arguments, ("architecture.model",))


def ocr_processor(processor_class: Any) -> Built:
    """Return how a processor is built: cells, newlines and separators are tokens."""
    arguments = {
        "image_processor": lambda spec, _: OcrImageProcessor(
            **{name: value for name, value in spec.processor.items() if name in SETTINGS}
        ),
        "tokenizer": the_tokenizer,
        "patch_size": of("architecture.stem.patch_size"),
        "downsample_ratio": FOLD,
    }
    return Built(processor_class, arguments)


class DeepseekOcrAdapter(Adapter):
    """`UnlimitedOcrForConditionalGeneration`: crops stitched to one plane (view 1), then the global view (view 0).

    Each row of cells ends with a newline token and the image with a separator; both are never pruned.
    """

    data = FamilyData(
        model_class=UnlimitedOcrForConditionalGeneration,
        # That of the release, which refers to remote code, and that of the library's class.
        types=("deepseek_vl_v2", UnlimitedOcrConfig.model_type),
        settings={**{name: ("", hint) for name, hint in SETTINGS.items()}, "clean_up": ("", Any)},
        conversation="plain",
        pieces="begun",
        # The release's config.json belongs to remote code, which holds the image settings.
        self_described=False,
        blocks="vision_encoder.encoder.layers",
        config=ocr_config(UnlimitedOcrConfig, vision_config(), full_layers),
        processor=ocr_processor(UnlimitedOcrProcessor),
    )

    @classmethod
    def format(cls, name: str | None, join: str | None = None, thinking: bool = False) -> str:
        """Return the only format: begin-of-sequence, a line for each image, the text.

        Raises:
            UserError: another format or media rule.
        """
        if name not in (None, cls.data.conversation):
            raise unknown_name("model.conversation", name, (cls.data.conversation,))
        join_of(join, cls.data.joins)
        return PLAIN

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return a processor with the checkpoint's tokenizer; `model.processor` replaces the remote code's settings."""
        return cls.new_processor(spec, cls.data.tokenizer(spec))

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the library's configuration with the sizes in the checkpoint's config.json.

        That file belongs to remote code; values that it omits come from the model's config file.
        """
        config, config_class = config_of(spec), cls.data.model_class.config_class
        sizes = released_sizes(config)
        if config.get("model_type") == config_class.model_type:
            sizes = library_sizes(load_part(spec, config_class))
        stated = {
            name: {**spec.architecture.get(name, {}), **table} for name, table in sizes.items()
        }
        stated_spec = replace(spec, architecture={**spec.architecture, **stated})
        return cls.configuration(stated_spec, cls.data.tokenizer(spec))

    def stem_layers(self) -> Sequence[Any]:
        """Return SAM's layers."""
        return cast("Sequence[Any]", self.model.model.vision_tower.sam_encoder.layers)

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for unknown settings and clean-ups, and for values that make no views."""
        super().check_settings(spec)
        check_views(cls.processor_settings(spec))
        clean_up = spec.processor.get("clean_up")
        if clean_up is not None and clean_up not in CLEAN_UPS:
            raise unknown_name("model.processor.clean_up", str(clean_up), (*CLEAN_UPS, "null"))

    def decode(self, ids: Tensor) -> list[str]:
        """Return answers with the special tokens around labels and boxes, cleaned up by `model.processor.clean_up`.

        Without these tokens, labels and boxes could not be distinguished from text.
        """
        tokenizer = self.processor.tokenizer
        ends = (tokenizer.eos_token_id, self.pad_id)
        answers = [takewhile(lambda token: token not in ends, row) for row in ids.tolist()]
        texts = [tokenizer.decode([*answer]) for answer in answers]
        clean_up = self.spec.processor.get("clean_up")
        clean = str if clean_up is None else CLEAN_UPS[clean_up]
        return [clean(text.strip()).strip() for text in texts]

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


#: Rows of the class's two tables of queries. A view must have as many cells, since each gets a placeholder.
QUERIES = (144, 256)


class OwnViewsProcessor(DeepseekOcr2Processor):
    """The library's processor, without its values for crops, which would override those of `model.processor`."""

    images_kwargs = ImagesKwargs()
    skip_tensor_conversion = UnlimitedOcrProcessor.skip_tensor_conversion


def dense_layers(**text: Any) -> dict[str, Any]:
    """Return a decoder's arguments, with the types of its MLPs by the release's count of dense ones, without a list."""
    n_dense = text.get("first_k_dense_replace", 1)
    types = ["dense"] * n_dense + ["sparse"] * (text["num_hidden_layers"] - n_dense)
    return {**text, "mlp_layer_types": text.get("mlp_layer_types") or types}


class DeepseekOcr2Adapter(DeepseekOcrAdapter):
    """`DeepseekOcr2ForConditionalGeneration`: queries of each crop (views 1..n), of the global view (0), a separator.

    The separator is never pruned. `pictures` pairs query k with cell k, since there are as many: a mean over a view, as
    in RTPrune's dynamic ratio, is valid, and a single pair has no meaning.
    """

    data = replace(
        DeepseekOcrAdapter.data,
        model_class=DeepseekOcr2ForConditionalGeneration,
        # That of the release, which is DeepSeek-OCR's too, and that of the library's class.
        types=("deepseek_vl_v2", DeepseekOcr2Config.model_type),
        unplaced=True,
        # Probes of the tower's attention ignore masks, which the encoder needs.
        lacking=("cls_attention", "cls_logits", "wide_cls_attention", "tower_received"),
        blocks="vision_encoder.layers",
        config=ocr_config(
            DeepseekOcr2Config,
            vision_config(num_key_value_heads=of("facts.tower.kv_heads")),
            dense_layers,
        ),
        processor=ocr_processor(OwnViewsProcessor),
    )

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for unknown settings, and for views with a number of cells that has no table of queries."""
        super().check_settings(spec)
        if "stem" not in spec.architecture:
            return  # a model in memory comes with its processor
        cell = FOLD * spec.architecture["stem"]["patch_size"]
        valid = [cell * math.isqrt(queries) for queries in QUERIES]
        sides = {f"size.{name}": side for name, side in spec.processor.get("size", {}).items()}
        sides["tile_size"] = spec.processor.get("tile_size")
        for name, side in sides.items():
            if side not in (*valid, None):
                raise UserError(
                    f"model.processor.{name}={side}: model={spec.name!r} has learned queries for views of "
                    f"{valid[0]} and {valid[1]} pixels alone; valid: {valid[0]}, {valid[1]}"
                )

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor; the class takes no grid of crops, since they are not stitched."""
        inputs = super().process(texts, pictures, clips)
        inputs.pop("patches_grid", None)
        return inputs

    def to_units(self, values: Tensor) -> Tensor:
        """Return the queries' (units, ...) of (views, cells and queries, ...) values."""
        return values[:, values.shape[1] // 2 :].flatten(0, 1)

    def _page(self, side: int, first: int) -> tuple[Tensor, ...]:
        """Return a row of queries."""
        units = torch.arange(first, first + side**2)
        return rectangle(1, 1, side**2), units, torch.zeros_like(units)

    def _plane(self, columns: int, rows: int, side: int, first: int) -> tuple[Tensor, ...]:
        """Return a row of queries for each crop."""
        views = range(1, columns * rows + 1)
        grid = torch.cat([rectangle(1, 1, side**2, view) for view in views])
        units = torch.arange(first, first + len(grid))
        return grid, units, torch.zeros_like(units)

    def _work(self, views: Tensor) -> Work:
        """Return the work of one view."""
        cells = self._cells(views) ** 2
        # Cells see cells; queries see cells, and queries up to themselves.
        pairs = 2 * cells**2 + cells * (cells + 1) // 2
        return super()._work(views)._replace(tokens=2 * cells, pairs=pairs)
