"""PaddleOCR-VL (Cui et al., 2025, arXiv 2510.14528): SigLIP on pictures of any size, two maps, ERNIE 4.5 0.3B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.conversations import FRAMED
from espalier.harness.models.llava_onevision import HALF
from espalier.harness.models.qwen_vl import PICTURE_BOUNDS, patch_processor
from espalier.harness.models.random_weights import Built, of, text_config, token_id, vision_config
from espalier.harness.models.raster_patches import RasterPatchesAdapter, squares

#: Placeholder of a picture.
PLACEHOLDER = "<|IMAGE_PLACEHOLDER|>"


class PaddleOcrVLAdapter(RasterPatchesAdapter):
    """`PaddleOCRVLForConditionalGeneration`: one grid of tokens per picture."""

    data = FamilyData(
        model_class=PaddleOCRVLForConditionalGeneration,
        conversation="paddleocr_vl",
        media=FRAMED,
        placeholders=(PLACEHOLDER,),
        inline=None,
        lacking=("luma",),  # the tower gets a list of patches, from pictures of any size
        settings=PICTURE_BOUNDS,
        special=(
            *("<unk>", "<s>", "</s>", "<|begin_of_sentence|>"),
            *("<|IMAGE_START|>", PLACEHOLDER, "<|IMAGE_END|>"),
        ),
        named_tokens={"image_token": PLACEHOLDER},
        tower="model.visual.vision_model",
        projector="model.projector",
        config=Built(
            PaddleOCRVLConfig,
            {
                # The class ties the head unless both parts say no.
                "text_config": text_config(
                    "architecture.model", head_dim=of("facts.text.head_dim")
                ),
                "vision_config": vision_config(),
                "image_token_id": token_id(PLACEHOLDER),
            },
            ("architecture.model",),
        ),
        processor=patch_processor(
            PaddleOCRVLProcessor, PaddleOCRVLImageProcessor, image_mean=HALF, image_std=HALF
        ),
    )

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
