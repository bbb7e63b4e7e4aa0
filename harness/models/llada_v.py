"""LLaDA-V: LLaVA-OneVision's vision side with SigLIP 2, in front of LLaDA, which denoises its answers.

LLaDA has Llama's architecture with bidirectional attention (`model.facts.diffusion`). LaViDa's and LLaDA-V's releases
are loaded under their tensor names, without their code: LaViDa's has LLaDA's names, LLaDA-V's has Llama's; no rows or
columns are permuted, since both rotate halves of a head. Both config.json belong to remote code, and neither describes
the tower, which is SigLIP so400m at 384 pixels without its last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionModel,
    LlavaOnevisionProcessor,
)

from espalier.harness.models import llava_releases as releases
from espalier.harness.models.conversations import FLUSH, JOINS
from espalier.harness.models.llava_onevision import (
    LlavaOnevisionAdapter,
    OnevisionVariant,
    siglip_config,
)
from espalier.harness.settings import OneOf
from espalier.harness.specs.run_spec import ModelSpec

_LAYER = r"^model\.transformer\.blocks\.(\d+)\."
_TEXT = "model.language_model."

#: LLaDA's names of the parts of a block, and Llama's.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}

#: From patterns of the releases' tensor names to the library's; a name changes at most once.
RENAMES = {
    **{rf"{_LAYER}{old}\.": rf"{_TEXT}layers.\1.{new}." for old, new in _BLOCK.items()},
    r"^model\.transformer\.wte\.": f"{_TEXT}embed_tokens.",
    r"^model\.transformer\.ln_f\.": f"{_TEXT}norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    **releases.RENAMES,
}

#: Values required in config.json, if stated, for the library's modules to compute the same.
_FIXED: Mapping[str, Any] = {
    **releases.FIXED,
    "rope": True,
    "alibi": False,
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "hidden_act": "silu",
    "scale_logits": False,
    "input_emb_norm": False,
    "attention_layer_norm": False,
    "mm_spatial_pool_mode": "bilinear",
}

#: LLaDA's special tokens: padding, begin, end, placeholders, marks of turns, and the mask token.
SPECIAL = (
    *("<|endoftext|>", "<|startoftext|>", "<|endoftext|>", "<image>", "<video>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>"),
)


#: What stands for each of several pictures: its padded view as in training, like a view of a single picture, then a
#: newline; or its patches alone, not pooled, which is what the releases' evaluations feed.
SEVERAL = ("training", "evaluation")


class LladaVModel(LlavaOnevisionModel):
    """`LlavaOnevisionModel`, in which the only view of a picture may stand for itself."""

    #: Whether the patches alone stand for each of several pictures, which have one view each.
    bare_views = False

    def pack_image_features(
        self,
        image_features: Any,
        image_sizes: Any,
        image_newline: Tensor | None = None,
        vision_aspect_ratio: str | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Return the tokens of each image from its projected views.

        Args:
            image_features: (views, patches, D) of each image, the global view first, then its tiles in raster order.
            image_sizes: (images, 2) height and width in pixels.
            image_newline: (D,) newline after each row of stitched tiles, or after the tokens of an image of one view.
            vision_aspect_ratio: views that a plane is shrunk to.

        Returns:
            (tokens, D) of each image, and the numbers of tokens.
        """
        newline = self.image_newline if image_newline is None else image_newline
        packed = [
            views[0]
            if self.bare_views and len(views) == 1
            else self.packed(views, size, newline.to(views), vision_aspect_ratio)
            for views, size in zip(image_features, image_sizes, strict=True)
        ]
        return packed, torch.tensor([len(tokens) for tokens in packed], device=packed[0].device)

    def packed(self, views: Tensor, size: Any, newline: Tensor, ratio: str | None) -> Tensor:
        """Return the tokens of one image from its views (V, patches, D)."""
        return cast(
            "Tensor", super().pack_image_features([views], size[None], newline, ratio)[0][0]
        )


class LladaVForConditionalGeneration(OnevisionVariant):
    """`LlavaOnevisionForConditionalGeneration` around a `LladaVModel`."""

    core: ClassVar[Any] = LladaVModel


class LladaVProcessor(LlavaOnevisionProcessor):
    """`LlavaOnevisionProcessor` with `bare_tokens` tokens for each of several pictures; None: the library's count."""

    bare_tokens: int | None = None

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        """Return the placeholders of one image."""
        numbers = [int(n) for n in image_inputs["batch_num_images"] for _ in range(int(n))]
        if self.bare_tokens is not None and numbers[image_idx] != 1:
            return str(self.image_token * self.bare_tokens)
        return super().replace_image_token(image_inputs, image_idx, **kwargs)


class LladaVAdapter(releases.ReleasedAdapter):
    """`LladaVForConditionalGeneration`: AnyRes for one image, one padded view for each of several (`SEVERAL`)."""

    data = replace(
        LlavaOnevisionAdapter.data,
        model_class=LladaVForConditionalGeneration,
        types=("llava_llada",),
        # The release's config.json belongs to remote code and does not describe the tower.
        self_described=False,
        renames=RENAMES,
        fixed=_FIXED,
        special=SPECIAL,
        # As in the release's evaluation, which requests short answers without reasoning.
        conversation="llada_no_think",
        joins={**JOINS, "flush": FLUSH},
        # As in the release's evaluation: one full stop at the end is dropped.
        clean=lambda text: text.removesuffix(".").strip(),
        settings={"several_pictures": ("", Annotated[str, OneOf(SEVERAL)] | None)},
        processor_class=LladaVProcessor,
        # As the releases resize.
        part_classes={"image_processor": LlavaOnevisionImageProcessorPil},
        config=siglip_config(LlavaOnevisionConfig, "llama"),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Set what stands for each of several pictures."""
        super().__init__(model, processor, spec)
        self._bare_views = spec.processor.get("several_pictures") == "evaluation"
        model.model.bare_views = self._bare_views
        processor.bare_tokens = self._side**2 if self._bare_views else None
