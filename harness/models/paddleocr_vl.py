"""PaddleOCR-VL (Cui et al., 2025, arXiv 2510.14528): SigLIP on pictures of any size, two maps, ERNIE 4.5 0.3B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.models.clip_blocks import clip_attention
from espalier.harness.models.conversations import FRAMED
from espalier.harness.models.llava_onevision import HALF
from espalier.harness.models.qwen_processor import set_picture_bounds
from espalier.harness.models.random_weights import text_config, vision_config
from espalier.harness.models.raster_patches import RasterPatchesAdapter, squares

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Placeholder of a picture.
PLACEHOLDER = "<|IMAGE_PLACEHOLDER|>"


class PaddleOcrVLAdapter(RasterPatchesAdapter):
    """`PaddleOCRVLForConditionalGeneration`: one grid of tokens per picture."""

    model_class = PaddleOCRVLForConditionalGeneration
    conversation: ClassVar[str] = "paddleocr_vl"
    media = FRAMED
    placeholders = (PLACEHOLDER,)
    special = (
        *("<unk>", "<s>", "</s>", "<|begin_of_sentence|>"),
        *("<|IMAGE_START|>", PLACEHOLDER, "<|IMAGE_END|>"),
    )

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration of SigLIP and the text stack."""
        head = spec.architecture["model"]  # the class ties it unless both parts say no
        text = {"head_dim": spec.facts.text.head_dim, **text_config(spec, tokenizer), **head}
        return PaddleOCRVLConfig(
            text_config=text,
            vision_config=vision_config(spec.facts.tower, spec),
            image_token_id=tokenizer.convert_tokens_to_ids(PLACEHOLDER),
            **head,
        )

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor with SigLIP's preprocessing for the tower's patches."""
        vision = spec.architecture["vision"]
        tokenizer._set_model_specific_special_tokens({"image_token": PLACEHOLDER})
        images = PaddleOCRVLImageProcessor(
            patch_size=vision["patch_size"],
            merge_size=vision["spatial_merge_size"],
            image_mean=HALF,
            image_std=HALF,
        )
        return set_picture_bounds(PaddleOCRVLProcessor(images, tokenizer), spec)

    @property
    def tower(self) -> nn.Module:
        """The SigLIP encoder, with rotary positions beside the learned ones."""
        tower: nn.Module = self.model.model.visual.vision_model
        return tower

    @property
    def projector(self) -> nn.Module:
        """Norm, squares of patches side by side, two maps."""
        projector: nn.Module = self.model.model.projector
        return projector

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of an encoder layer; by default, of the last."""
        return clip_attention(self.tower, -1, index)

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture: squares of patches in raster order."""
        side = self.model.config.vision_config.spatial_merge_size
        items: list[VisualItem] = []
        first = 0
        for rows, columns in self.grids(inputs):
            source = squares(rows, columns, side, first)
            grid = rectangle(1, rows // side, columns // side)
            patches, share = rows * columns, torch.full(source.shape, side**-2)
            work = Work(tokens=patches, pairs=patches**2, units=len(source))
            items.append(VisualItem(grid, source, share, work=work))
            first += patches
        return {self.model.config.image_token_id: items}
