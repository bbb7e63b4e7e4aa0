"""LLaVA-1.5 and models of its architecture: CLIP tower with a class token, MLP projector, Llama text stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessor,
    LlavaProcessor,
)

from espalier.harness.cost.row_work import Work
from espalier.harness.engine.brightness import PixelGrids
from espalier.harness.engine.visual_items import VisualItem, rectangle
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.clip_blocks import ClipTowerAdapter
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

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


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
        settings={"do_pad": None},
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
        return self._side() ** 2

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image: patches in raster order."""
        if "pixel_values" not in inputs:
            return {self.model.config.image_token_id: []}
        side = self._side()
        grid, n = rectangle(1, side, side), side**2
        work = Work(tokens=n + 1, pairs=(n + 1) ** 2, units=n)
        images = range(inputs["pixel_values"].shape[0])
        items = [
            VisualItem(grid, torch.arange(n).view(-1, 1) + n * image, work=work) for image in images
        ]
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

    def _side(self) -> int:
        """Return the number of patches along the edge of a view."""
        config = self.model.config.vision_config
        side: int = config.image_size // config.patch_size
        return side

    def square(self, pixels: Tensor) -> PixelGrids:
        """Return (n, 3, S, S) pixels divided into the tower's patches."""
        config = self.model.config.vision_config
        side: int = config.patch_size
        return PixelGrids([pixels], [config.image_size // side], side, *self.colours())
