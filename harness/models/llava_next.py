"""LLaVA-NeXT: a global view and crops of the image (AnyRes), without padding, a newline token after each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
)
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

from espalier.harness.engine.layout import VisualItem
from espalier.harness.engine.pixels import PixelGrids
from espalier.harness.models.anyres import packed_item
from espalier.harness.models.llava import LlavaAdapter
from espalier.harness.models.loader import load_part
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox, padded_box

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


class LlavaNextAdapter(LlavaAdapter):
    """`LlavaNextForConditionalGeneration`: view 0 is the global view, view 1 the stitched crops; newlines are kept."""

    model_class = LlavaNextForConditionalGeneration
    config_class = LlavaNextConfig
    processor_class = LlavaNextProcessor
    picture_class = LlavaNextImageProcessor
    settings = ()

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor."""
        return load_part(spec, AutoProcessor)

    @classmethod
    def picture_settings(cls, spec: ModelSpec) -> Mapping[str, Any]:
        """Return the valid sizes of the plane of crops."""
        return {"image_grid_pinpoints": spec.architecture["model"]["image_grid_pinpoints"]}

    def image_tokens(self) -> int | None:
        """Return None: the number depends on the image's shape."""
        return None

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image: the global view, then the rows of stitched crops with a newline token each."""
        config = self.model.config
        side = self._side()
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
        side = self._side()
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
        tokens: Tensor = packed[0]
        return tokens
