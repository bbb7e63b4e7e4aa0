"""Gemma 3 (Gemma Team, 2025, arXiv 2503.19786): SigLIP at 896 pixels pooled to 256 tokens, sliding and full layers.

The visual tokens of a picture see one another. Pictures are scaled to a square; pan and scan is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.nn.functional import pad
from transformers import Gemma3ForConditionalGeneration, Gemma3ImageProcessor, Gemma3Processor

from espalier.harness.engine.layer_inputs import LayerTypes
from espalier.harness.engine.layout import VisualItem
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.square_views import PooledViewsAdapter, square_items
from espalier.harness.models.conversations import STARTED
from espalier.harness.models.random_weights import (
    SIGLIP_PIXELS,
    Built,
    built_processor,
    of,
    text_config,
    vision_config,
)

#: Begins a picture; the processor adds its tokens and its end.
START = "<start_of_image>"

#: Special tokens of a picture, by the names that the processor reads.
MARKS = {"boi_token": START, "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


class Gemma3Adapter(PooledViewsAdapter):
    """`Gemma3ForConditionalGeneration`: each picture is one square grid of pooled tokens."""

    data = FamilyData(
        model_class=Gemma3ForConditionalGeneration,
        conversation="gemma3",
        media=STARTED,
        placeholders=(START,),
        inline=START,
        pieces="begun",
        layer_types=LayerTypes,
        attentions=("sdpa", "eager"),
        masks="has visual tokens that see one another, which needs a mask",
        special=("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", *MARKS.values()),
        named_tokens=MARKS,
        vision=vision_config(model_type="siglip_vision_model"),
        text=text_config(head_dim=of("facts.text.head_dim")),
        token_ids={f"{name}_index": mark for name, mark in MARKS.items()},
        processor=built_processor(
            Gemma3Processor,
            image_processor=Built(Gemma3ImageProcessor, SIGLIP_PIXELS),
            image_seq_length=of("architecture.model.mm_tokens_per_image"),
        ),
    )

    def side(self) -> int:
        """Return the number of units along the edge of a picture."""
        return cast("int", round(self.model.config.mm_tokens_per_image**0.5))

    def image_tokens(self) -> int | None:
        """Return the tokens of a picture."""
        return self.side() ** 2

    def features(self, projector_input: Tensor) -> Tensor:
        """Return the pooled features (units, D), by the projector's own pooling."""
        grids = projector_input.transpose(1, 2).unflatten(2, (self.patches(), -1))
        pooled: Tensor = self.projector.avg_pool(grids.contiguous())
        return pooled.flatten(2).transpose(1, 2).flatten(0, 1)

    def project(self, features: Tensor) -> Tensor:
        """Normalise and project pooled features, laid out like the projector's pictures, so that sums round alike."""
        count, n_units = len(features), self.side() ** 2
        pictures = pad(features, (0, 0, 0, -count % n_units)).unflatten(0, (-1, n_units))
        columns = pictures.transpose(1, 2).contiguous().transpose(1, 2)
        projected: Tensor = self.projector.mm_soft_emb_norm(columns)
        projected = projected @ self.projector.mm_input_projection_weight
        return projected.type_as(features).flatten(0, 1)[:count]

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture: units in raster order."""
        items = square_items(len(inputs.get("pixel_values", ())), self.side(), self.patches())
        return {self.model.config.image_token_id: items}
