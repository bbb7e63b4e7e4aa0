"""LLaVA-NeXT: a global view and crops of the image (AnyRes), padding cut off, a newline token after each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
)
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

from harness.adapters.anyres import packed_item
from harness.adapters.base import Adapter
from harness.adapters.llava import VICUNA, clip_attention
from harness.adapters.loading import load_part
from harness.adapters.random_weights import text_config, vision_config
from harness.engine.items import Item

if TYPE_CHECKING:
    from harness.config.spec import ModelSpec


class LlavaNextAdapter(Adapter):
    """`LlavaNextForConditionalGeneration`: view 0 is the whole image, view 1 its stitched crops; newlines stay."""

    model_class = LlavaNextForConditionalGeneration

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Load the checkpoint's."""
        return load_part(spec, AutoProcessor)

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """CLIP, an MLP and Llama."""
        return LlavaNextConfig(
            vision_config={
                "model_type": "clip_vision_model",
                **vision_config(spec.facts.tower, spec),
            },
            text_config={"model_type": "llama", **text_config(spec, tokenizer)},
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            **spec.architecture["model"],
        )

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """AnyRes preprocessing at the tower's size."""
        vision = spec.architecture["vision"]
        side = vision["image_size"]
        return LlavaNextProcessor(
            image_processor=LlavaNextImageProcessor(
                size={"shortest_edge": side},
                crop_size={"height": side, "width": side},
                image_grid_pinpoints=spec.architecture["model"]["image_grid_pinpoints"],
            ),
            tokenizer=tokenizer,
            patch_size=vision["patch_size"],
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            image_token="<image>",
            chat_template=VICUNA,
        )

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return an encoder layer's attention."""
        return clip_attention(self.tower, self.model.config.vision_feature_layer, index)

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[Item]]:
        """Global view, then the stitched crops row by row, each row ended by a newline token."""
        config = self.model.config
        side = config.vision_config.image_size // config.vision_config.patch_size
        found: list[Item] = []
        first = 0
        for size in inputs["image_sizes"].cpu():
            shape = get_anyres_image_grid_shape(
                size, config.image_grid_pinpoints, config.vision_config.image_size
            )
            found.append(packed_item(partial(self._pack, size), shape, side, first, True))
            first += found[-1].work.units
        return {config.image_token_id: found}

    def _pack(self, size: Tensor, features: Tensor) -> Tensor:
        """Run the model's own packing on one image of `size` (height, width)."""
        packed, _ = self.model.model.pack_image_features(
            [features],
            size.unsqueeze(0),
            vision_feature_select_strategy="default",
            image_newline=torch.full(features.shape[-1:], torch.nan),
        )
        tokens: Tensor = packed[0]
        return tokens
