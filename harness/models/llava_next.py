"""LLaVA-NeXT: LLaVA-1.5 with a global view and crops of the image (AnyRes).

Crops are stitched without padding, with a newline token after each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import (
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
)
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

from espalier.harness.engine.layout import VisualItem
from espalier.harness.engine.model_parts import PixelGrids
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.architectures.anyres_views import packed_features, packed_item
from espalier.harness.models.llava import LlavaAdapter
from espalier.harness.models.random_weights import CLIP_SIZES, Built, clip_processor, of
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox, padded_box

#: Sizes of an image processor: the tower's, and those of the planes of crops.
PLANES = {**CLIP_SIZES, "image_grid_pinpoints": of("architecture.model.image_grid_pinpoints")}


class LlavaNextAdapter(LlavaAdapter):
    """`LlavaNextForConditionalGeneration`: view 0 is the global view, view 1 the stitched crops; newlines are kept."""

    data = replace(
        LlavaAdapter.data,
        model_class=LlavaNextForConditionalGeneration,
        settings={},
        processor=clip_processor(LlavaNextProcessor, Built(LlavaNextImageProcessor, PLANES)),
    )

    # The number depends on the image's shape.
    image_tokens = Adapter.image_tokens

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image: the global view, then the rows of stitched crops with a newline token each."""
        config, side = self.model.config, self.patches()
        default = {"vision_feature_select_strategy": "default"}
        items: list[VisualItem] = []
        first = 0
        for size in inputs["image_sizes"].cpu() if "image_sizes" in inputs else ():
            shape = get_anyres_image_grid_shape(
                size, config.image_grid_pinpoints, config.vision_config.image_size
            )
            pack = partial(packed_features, self.model.model, default, size)
            items.append(packed_item(pack, shape, side, first, True))
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
        images = zip(inputs["pixel_values"], tiles, strict=True)
        views = torch.cat([tiles_of_image[:count] for tiles_of_image, count in images])
        return self.pixel_grids(views, side)
