"""HunyuanOCR (Tencent, 2025, arXiv 2511.19575): SigLIP's shape on pictures of any size, convolutions, Hunyuan 0.5B.

Positions have four axes: of the sequence, column and row in the picture, and number of the picture.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import (
    HunYuanVLForConditionalGeneration,
    HunYuanVLImageProcessor,
    HunYuanVLProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, framed_rectangle
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.patch_lists import (
    PICTURE_BOUNDS,
    RasterPatchesAdapter,
    patch_processor,
    squares,
)
from espalier.harness.models.architectures.text_positions import row_positions
from espalier.harness.models.conversations import HOLDERS
from espalier.harness.models.random_weights import of, text_config
from espalier.harness.specs.run_spec import ModelSpec

#: Special tokens of a picture, by the names that the processor reads.
MARKS = {
    "image_start_token": "<｜hy_place▁holder▁no▁100｜>",
    "image_token": "<｜hy_place▁holder▁no▁102｜>",
    "image_end_token": "<｜hy_place▁holder▁no▁101｜>",
}


class HunyuanOcrAdapter(RasterPatchesAdapter):
    """`HunYuanVLForConditionalGeneration`: begin, rows of cells that end with a newline each, end.

    Begin, newlines and end are never pruned.
    """

    data = FamilyData(
        model_class=HunYuanVLForConditionalGeneration,
        conversation="hunyuan_ocr",
        media=HOLDERS,
        placeholders=(MARKS["image_token"],),
        inline=None,
        lacking=("luma",),  # the tower gets a list of patches, from pictures of any size
        settings=PICTURE_BOUNDS,
        special=(
            *("<｜hy_▁pad▁｜>", "<｜hy_begin▁of▁sentence｜>", "<｜hy_place▁holder▁no▁2｜>"),
            *("<｜hy_place▁holder▁no▁3｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>", *MARKS.values()),
        ),
        named_tokens=MARKS,
        blocks="layers",
        # Norm, two convolutions, newlines, one map, begin and end, norm.
        projector="model.vision_tower.patch_merger",
        text=text_config(head_dim=of("facts.text.head_dim")),
        token_ids={"image_token_id": MARKS["image_token"]},
        processor=patch_processor(HunYuanVLProcessor, HunYuanVLImageProcessor),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Let the library number the pictures of each prompt from 0, also in a batch."""
        super().__init__(model, processor, spec)
        model.model.get_rope_index = partial(row_positions, model.model.get_rope_index)

    @property
    def vision_end(self) -> nn.Module:
        """The tower: it calls the projector for each picture."""
        return cast("nn.Module", self.tower)

    def picture_item(self, rows: int, columns: int, first: int) -> VisualItem:
        """Return the item of a picture; begin, newlines and end have no patches."""
        side = self.model.config.vision_config.spatial_merge_size
        height, width = rows // side, columns // side
        places, prunable = framed_rectangle(height, width)
        source = torch.zeros(len(places), side**2, dtype=torch.long)
        source[prunable] = squares(rows, columns, side, first)
        patches = rows * columns
        return VisualItem(
            grid=pad(places, (2, 0)),
            source=source,
            share=torch.full(source.shape, side**-2),
            prunable=prunable,
            work=Work(tokens=patches, pairs=patches**2, units=height * (width + 1)),
        )
