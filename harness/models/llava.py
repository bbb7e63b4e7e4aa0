"""LLaVA-1.5: CLIP tower with a class token, MLP projector, Llama text stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import LlavaForConditionalGeneration, LlavaImageProcessor, LlavaProcessor

from espalier.harness.engine.layout import VisualItem
from espalier.harness.engine.model_parts import PixelGrids
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.square_views import ClipTowerAdapter, square_items
from espalier.harness.models.conversations import JOINS
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import (
    CLIP_SIZES,
    Built,
    clip_processor,
    text_config,
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


class LlavaAdapter(ClipTowerAdapter):
    """`LlavaForConditionalGeneration`: each image is one square grid of tokens, all prunable."""

    data = FamilyData(
        model_class=LlavaForConditionalGeneration,
        conversation="vicuna_v1",
        joins=JOINS,
        pieces="alone",
        patch_tokens=True,
        settings={"do_pad": ("", bool)},
        vision=vision_config(model_type="clip_vision_model"),
        text=text_config(model_type="llama"),
        token_ids={"image_token_index": "<image>"},
        processor=clip_processor(
            LlavaProcessor, Built(LlavaImageProcessor, CLIP_SIZES, ("processor",))
        ),
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
        return self.pixel_grids(inputs["pixel_values"], self.patches())
