"""LLaVA-1.5 and LLaVA-NeXT: CLIP tower with a class token, MLP projector, Llama text stack.

LLaVA-NeXT sees a global view and crops of the image (AnyRes), without padding, with a newline token after each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
)
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem
from espalier.harness.engine.model_parts import PixelGrids, TowerBlock
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter, FamilyData, square_items
from espalier.harness.models.conversations import JOINS
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import (
    Built,
    of,
    text_config,
    the_tokenizer,
    token_id,
    vision_config,
)
from espalier.harness.models.view_placement import (
    WHOLE,
    PictureView,
    ViewBox,
    central_square,
    padded_box,
)
from espalier.harness.specs.run_spec import ModelSpec


class ClipTowerAdapter(Adapter):
    """A family with a projector that reads hidden_states[vision_feature_layer] of a CLIP or SigLIP tower."""

    def tower_attention(self, index: int | None) -> Any:
        """Return the attention of an encoder layer; hidden_states[-2] is the output of the last layer but one."""
        return super().tower_attention(self.read_layers() - 1 if index is None else index)

    def unread_blocks(self) -> Sequence[nn.Module]:
        """Return the encoder's layers after the one of `vision_feature_layer`."""
        return list(self.tower_layers())[self.read_layers() :]

    def tower_blocks(self) -> Sequence[TowerBlock]:
        """Return the encoder's layers up to the one of `vision_feature_layer`."""
        return [TowerBlock(layer) for layer in list(self.tower_layers())[: self.read_layers()]]

    def read_layers(self) -> int:
        """Return the number of the encoder's layers that the projector reads: hidden_states[0] is the embeddings.

        Raises:
            UserError: the checkpoint's feature layer is not one of them.
        """
        feature, depth = self.model.config.vision_feature_layer, len(self.tower.encoder.layers)
        if (
            not isinstance(feature, int)
            or not 0 < feature % (depth + 1) <= depth
            or abs(feature) > depth
        ):
            raise UserError(
                f"model: the checkpoint's vision_feature_layer={feature!r} is not a layer of a tower of {depth}; "
                f"valid in its config.json: -1 to -{depth}"
            )
        return feature % (depth + 1)


#: From (tiles, patches, C) features of one image to its (placeholders, C) tokens, newlines as NaN.
Pack = Callable[[Tensor], Tensor]


def packed_item(
    pack: Pack,
    shape: tuple[int, int],
    side: int,
    first: int,
    class_token: bool,
    view: int | None = None,
) -> VisualItem:
    """Return the item of one image: its global view, then its crops as one plane with a newline after each row.

    If the packing pools tiles or shrinks a large plane, each token blends four patches. Interpolation is linear, so the
    packed coordinates give the four patches and their weights.

    Args:
        pack: packing of the model.
        shape: rows and columns of crops, (0, 0) for an image of one tile.
        side: patches along the edge of a tile.
        first: number of the image's first projector unit; units of the global view come first.
        class_token: whether the tower adds a token to each tile.
        view: tokens along the edge of the global view, if the packing pools tiles; None: `side`.
    """
    patches, tiles = side**2, 1 + shape[0] * shape[1]
    raster, global_grid = (
        torch.cartesian_prod(torch.arange(edge), torch.arange(edge))
        for edge in (side, view or side)
    )
    corner = torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1])) * side
    corner = torch.cat([torch.zeros(1, 2, dtype=torch.long), corner])
    packed = pack((corner[:, None] + raster).double())
    newline = packed[:, 0].isnan()
    prunable = ~newline
    cropped = torch.arange(len(packed)) >= len(global_grid)
    low = packed.nan_to_num().floor().long()
    part = packed.nan_to_num() - low

    def unit(place: Tensor) -> Tensor:
        tile = _tile(place, shape[1], side, cropped)
        offset = place % side
        return first + tile * patches + offset[:, 0] * side + offset[:, 1]

    corners = [low + torch.tensor(step) for step in ((0, 0), (0, 1), (1, 0), (1, 1))]
    weights = [
        (1 - part).prod(1),
        (1 - part[:, 0]) * part[:, 1],
        part[:, 0] * (1 - part[:, 1]),
        part.prod(1),
    ]
    source, share = unit(low).unsqueeze(1), None
    if bool((part > 0).any()):
        share = torch.stack(weights, dim=1)
        # Corners with weight 0 may lie outside the plane.
        source = torch.where(share > 0, torch.stack([unit(c) for c in corners], 1), source)
    n_tokens = patches + int(class_token)
    return VisualItem(
        grid=_grid(newline, cropped, global_grid),
        source=source,
        share=share,
        prunable=prunable,
        tile=_tile(low, shape[1], side, cropped),
        work=Work(tokens=tiles * n_tokens, pairs=tiles * n_tokens**2, units=tiles * patches),
    )


def _tile(place: Tensor, columns: int, side: int, cropped: Tensor) -> Tensor:
    """Return the tile of each position: 0 for the global view, then the crops in raster order."""
    crop = place // side
    return torch.where(cropped, 1 + crop[:, 0] * columns + crop[:, 1], 0)


def _grid(newline: Tensor, cropped: Tensor, raster: Tensor) -> Tensor:
    """Return (n, 4) coordinates: view 0 in raster order, view 1 row by row between its newlines."""
    before = newline.long().cumsum(0) - newline.long()
    place = torch.arange(len(newline))
    starts = torch.cat([torch.tensor([len(raster)]), newline.nonzero()[:, 0] + 1])
    column = place - starts[before]
    grid = torch.stack([torch.zeros_like(place), cropped.long(), before, column], dim=1)
    grid[: len(raster), 2:] = raster
    return grid


#: Sizes of an image processor: those of the tower.
SIZES = {
    "size": Built(dict, {"shortest_edge": of("architecture.vision.image_size")}),
    "crop_size": Built(
        dict, dict.fromkeys(("height", "width"), of("architecture.vision.image_size"))
    ),
}


def clip_config(config_class: Any) -> Built:
    """Return how a configuration of CLIP, an MLP and Llama is built."""
    arguments = {
        "vision_config": vision_config(model_type="clip_vision_model"),
        "text_config": text_config(model_type="llama"),
        "image_token_index": token_id("<image>"),
    }
    return Built(config_class, arguments, ("architecture.model",))


def clip_processor(processor_class: Any, images: Built) -> Built:
    """Return how a processor with CLIP's preprocessing is built."""
    arguments = {
        "image_processor": images,
        "tokenizer": the_tokenizer,
        "patch_size": of("architecture.vision.patch_size"),
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    return Built(processor_class, arguments)


class LlavaAdapter(ClipTowerAdapter):
    """`LlavaForConditionalGeneration`: each image is one square grid of tokens, all prunable."""

    data = FamilyData(
        model_class=LlavaForConditionalGeneration,
        conversation="vicuna_v1",
        joins=JOINS,
        pieces="alone",
        patch_tokens=True,
        settings={"do_pad": ("", bool)},
        config=clip_config(LlavaConfig),
        processor=clip_processor(LlavaProcessor, Built(LlavaImageProcessor, SIZES, ("processor",))),
    )

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor; `model.processor.do_pad` pads images to a square, as LLaVA-1.5 does.

        The published processor settings crop the centre instead, which removes the borders.
        """
        processor = super().load_processor(spec)
        if spec.processor.get("do_pad"):
            processor.image_processor = load_part(spec, LlavaImageProcessor, **spec.processor)
        return processor

    def image_tokens(self) -> int | None:
        """Return the number of patches of one view."""
        return self.patches() ** 2

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image: patches in raster order."""
        side = self.patches()
        items = square_items(len(inputs.get("pixel_values", ())), side, side, class_tokens=1)
        return {self.model.config.image_token_id: items}

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the square that the picture is padded to, or the central square cropped from it."""
        images = self.processor.image_processor
        if getattr(images, "do_pad", False):
            return padded_box(view)
        if not images.do_center_crop:
            return WHOLE
        edge = images.size["shortest_edge"] or images.crop_size["height"]
        return central_square(view.size, images.crop_size["height"] / edge)

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return the images of a batch in order."""
        return self.square(inputs["pixel_values"])

    def square(self, pixels: Tensor) -> PixelGrids:
        """Return (n, 3, S, S) pixels divided into the tower's patches."""
        edge: int = self.model.config.vision_config.patch_size
        return PixelGrids([pixels], [self.patches()], edge, *self.colours())


class LlavaNextAdapter(LlavaAdapter):
    """`LlavaNextForConditionalGeneration`: view 0 is the global view, view 1 the stitched crops; newlines are kept."""

    data = replace(
        LlavaAdapter.data,
        model_class=LlavaNextForConditionalGeneration,
        settings={},
        config=clip_config(LlavaNextConfig),
        processor=clip_processor(
            LlavaNextProcessor,
            Built(
                LlavaNextImageProcessor,
                {**SIZES, "image_grid_pinpoints": of("architecture.model.image_grid_pinpoints")},
            ),
        ),
    )

    def image_tokens(self) -> int | None:
        """Return None: the number depends on the image's shape."""
        return None

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image: the global view, then the rows of stitched crops with a newline token each."""
        config = self.model.config
        side = self.patches()
        items: list[VisualItem] = []
        first = 0
        for size in inputs["image_sizes"].cpu() if "image_sizes" in inputs else ():
            shape = get_anyres_image_grid_shape(
                size, config.image_grid_pinpoints, config.vision_config.image_size
            )
            items.append(packed_item(partial(self._pack, size), shape, side, first, True))
            first += items[-1].work.units
        return {config.image_token_id: items}

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the whole picture for the global view; crops are padded, and padding is removed by whole cells."""
        return padded_box(view) if view.index else WHOLE

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return the global view and crops of each image, without the padding tiles of the batch."""
        side = self.patches()
        (items,) = self.items(inputs).values()
        tiles = [item.work.units // side**2 for item in items]
        parts = [
            tiles_of_image[:count]
            for tiles_of_image, count in zip(inputs["pixel_values"], tiles, strict=True)
        ]
        return self.square(torch.cat(parts))

    def _pack(self, size: Tensor, features: Tensor) -> Tensor:
        """Return the model's packing of one image of `size` (height, width)."""
        packed, _ = self.model.model.pack_image_features(
            [features],
            size.unsqueeze(0),
            vision_feature_select_strategy="default",
            image_newline=torch.full(features.shape[-1:], torch.nan),
        )
        return cast("Tensor", packed[0])
