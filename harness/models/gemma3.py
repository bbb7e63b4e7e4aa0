"""Gemma 3 (Gemma Team, 2025, arXiv 2503.19786): SigLIP at 896 pixels pooled to 256 tokens, sliding and full layers.

The visual tokens of a picture see one another. Pictures are scaled to a square; pan and scan is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import (
    AutoProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layer_inputs import LayerTypes
from espalier.harness.engine.layout import VisualItem, mean_of_blocks, rectangle
from espalier.harness.engine.pixels import PixelGrids
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.clip_blocks import clip_attention
from espalier.harness.models.conversations import STARTED
from espalier.harness.models.llava_onevision import HALF
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import text_config, vision_config

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Begins a picture; the processor adds its tokens and its end.
START = "<start_of_image>"

#: Special tokens of a picture, by the names that the processor reads.
MARKS = {"boi_token": START, "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


def refuse_flash(spec: ModelSpec) -> None:
    """Raise UserError for attention that takes no mask, on a model with visual tokens that see one another."""
    if spec.attention.startswith("flash"):
        raise UserError(
            f"model.attention={spec.attention!r}: the visual tokens of model={spec.name!r} see one another, which "
            "needs a mask; valid: sdpa, eager"
        )


class Gemma3Adapter(Adapter):
    """`Gemma3ForConditionalGeneration`: each picture is one square grid of pooled tokens."""

    model_class = Gemma3ForConditionalGeneration
    conversation: ClassVar[str] = "gemma3"
    media = STARTED
    joins: ClassVar[Mapping[str, str]] = {}
    placeholders = (START,)
    inline = START
    pieces = "begun"
    special = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", *MARKS.values())

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Refuse attention that takes no mask: visual tokens see later ones of their picture."""
        super().check_settings(spec)
        refuse_flash(spec)

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor."""
        return load_part(spec, AutoProcessor)

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration of SigLIP and the text stack."""
        text = {"head_dim": spec.facts.text.head_dim, **text_config(spec, tokenizer)}
        marks = zip(("boi", "eoi", "image"), MARKS.values(), strict=True)
        return Gemma3Config(
            text_config=text,
            vision_config={
                "model_type": "siglip_vision_model",
                **vision_config(spec.facts.tower, spec),
            },
            **{
                f"{name}_token_index": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks
            },
            **spec.architecture["model"],
        )

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor with SigLIP's preprocessing at the tower's size."""
        side = spec.architecture["vision"]["image_size"]
        tokenizer._set_model_specific_special_tokens(MARKS)
        images = Gemma3ImageProcessor(
            size={"height": side, "width": side}, image_mean=HALF, image_std=HALF
        )
        tokens = spec.architecture["model"]["mm_tokens_per_image"]
        return Gemma3Processor(images, tokenizer, image_seq_length=tokens)

    @cached_property
    def layer_types(self) -> LayerTypes:
        """Sliding and full layers."""
        return LayerTypes(self.decoder)

    @property
    def projector(self) -> Any:
        """Pooling, norm and one matrix."""
        return self.model.model.multi_modal_projector

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of an encoder layer; by default, of the last."""
        return clip_attention(self.tower, -1, index)

    def image_tokens(self) -> int | None:
        """Return the tokens of a picture."""
        return self._side() ** 2

    def to_units(self, values: Tensor) -> Tensor:
        """Average (pictures, patches, ...) over the patches that the projector pools into one unit."""
        return mean_of_blocks(values, self._side())

    def features(self, projector_input: Tensor) -> Tensor:
        """Return the pooled features (units, D), by the projector's own pooling."""
        grids = projector_input.transpose(1, 2).unflatten(2, (self._patches(), -1))
        pooled: Tensor = self.projector.avg_pool(grids.contiguous())
        return pooled.flatten(2).transpose(1, 2).flatten(0, 1)

    def project(self, features: Tensor) -> Tensor:
        """Normalise and project pooled features, laid out like the projector's pictures, so that sums round alike."""
        count, n_units = len(features), self._side() ** 2
        pictures = pad(features, (0, 0, 0, -count % n_units)).unflatten(0, (-1, n_units))
        columns = pictures.transpose(1, 2).contiguous().transpose(1, 2)
        projected: Tensor = self.projector.mm_soft_emb_norm(columns)
        projected = projected @ self.projector.mm_input_projection_weight
        return projected.type_as(features).flatten(0, 1)[:count]

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture: units in raster order."""
        pixels = inputs.get("pixel_values", ())
        side, patches = self._side(), self._patches() ** 2
        n_units = side**2
        grid = rectangle(1, side, side)
        work = Work(tokens=patches, pairs=patches**2, units=n_units)
        items = [
            VisualItem(grid, torch.arange(n_units).view(-1, 1) + n_units * picture, work=work)
            for picture in range(len(pixels))
        ]
        return {self.model.config.image_token_id: items}

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return the pictures, each divided into units."""
        pixels, side = inputs["pixel_values"], self._side()
        return PixelGrids([pixels], [side], pixels.shape[-1] // side, *self.colours())

    def _patches(self) -> int:
        """Return the number of patches along the edge of a picture."""
        vision = self.model.config.vision_config
        patches: int = vision.image_size // vision.patch_size
        return patches

    def _side(self) -> int:
        """Return the number of units along the edge of a picture."""
        side: int = round(self.model.config.mm_tokens_per_image**0.5)
        return side
