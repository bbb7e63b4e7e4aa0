"""LLaVA-1.5 and models of its architecture: CLIP tower with a class token, MLP projector, Llama text stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessor,
    LlavaProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.engine.pixels import PixelGrids
from espalier.harness.models.clip_blocks import ClipTowerAdapter
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import text_config, vision_config
from espalier.harness.models.view_placement import (
    WHOLE,
    PictureView,
    ViewBox,
    central_square,
    padded_box,
)

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


class LlavaAdapter(ClipTowerAdapter):
    """`LlavaForConditionalGeneration`: each image is one square grid of tokens, all prunable."""

    model_class: ClassVar[Any] = LlavaForConditionalGeneration
    config_class: ClassVar[Any] = LlavaConfig
    processor_class: ClassVar[Any] = LlavaProcessor
    picture_class: ClassVar[Any] = LlavaImageProcessor
    settings: ClassVar[tuple[str, ...]] = ("do_pad",)
    conversation: ClassVar[str] = "vicuna_v1"
    pieces = "alone"
    patch_tokens: ClassVar[bool] = True

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor; `model.processor.do_pad` pads images to a square, as LLaVA-1.5 does.

        The published processor settings crop the centre instead, which removes the borders.
        """
        processor = load_part(spec, AutoProcessor)
        if spec.processor.get("do_pad"):
            processor.image_processor = load_part(spec, LlavaImageProcessor, **spec.processor)
        return processor

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration of CLIP, an MLP and Llama."""
        return cls.config_class(
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
        """Return a processor with CLIP's preprocessing at the tower's size."""
        vision = spec.architecture["vision"]
        side = vision["image_size"]
        return cls.processor_class(
            image_processor=cls.picture_class(
                size={"shortest_edge": side},
                crop_size={"height": side, "width": side},
                **cls.picture_settings(spec),
            ),
            tokenizer=tokenizer,
            patch_size=vision["patch_size"],
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            image_token="<image>",
        )

    @classmethod
    def picture_settings(cls, spec: ModelSpec) -> Mapping[str, Any]:
        """Return the settings of a new image processor besides its sizes."""
        return spec.processor

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
