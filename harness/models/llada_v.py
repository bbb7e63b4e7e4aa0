"""LLaDA-V: LLaVA-OneVision's vision side with SigLIP 2, in front of LLaDA, which denoises its answers.

LLaDA has Llama's architecture with bidirectional attention (`model.facts.diffusion`). LaViDa's and LLaDA-V's releases
are loaded under their tensor names, without their code: LaViDa's has LLaDA's names, LLaDA-V's has Llama's; no rows or
columns are permuted, since both rotate halves of a head. Both config.json belong to remote code, and neither describes
the tower, which is SigLIP so400m at 384 pixels without its last layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionModel,
    LlavaOnevisionProcessor,
    PreTrainedTokenizerFast,
)

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.models.conversations import FLUSH, JOINS
from espalier.harness.models.llava_onevision import (
    LlavaOnevisionAdapter,
    OnevisionVariant,
    siglip_config,
)
from espalier.harness.models.loader import config_of, load_part
from espalier.harness.settings import OneOf

if TYPE_CHECKING:
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
    r"^model\.(embed_tokens|layers|norm)\.": rf"{_TEXT}\1.",
    r"^model\.vision_tower\.vision_tower\.vision_model\.": "model.vision_tower.",
    r"^model\.mm_projector\.0\.": "model.multi_modal_projector.linear_1.",
    r"^model\.mm_projector\.2\.": "model.multi_modal_projector.linear_2.",
}

#: Sizes of the text stack: the library's keys, and the equivalent keys of config.json; the first that exists is used.
_SIZES = {
    "vocab_size": ("embedding_size", "vocab_size"),
    "hidden_size": ("d_model", "hidden_size"),
    "intermediate_size": ("mlp_hidden_size", "intermediate_size"),
    "num_hidden_layers": ("n_layers", "num_hidden_layers"),
    "num_attention_heads": ("n_heads", "num_attention_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_key_value_heads"),
    "max_position_embeddings": ("max_sequence_length", "max_position_embeddings"),
    "rms_norm_eps": ("rms_norm_eps",),
}

#: Values required in config.json, if stated, for the library's modules to compute the same.
_FIXED: Mapping[str, Any] = {
    "rope": True,
    "alibi": False,
    "rope_scaling": None,
    "use_sliding_window": False,
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "hidden_act": "silu",
    "scale_logits": False,
    "input_emb_norm": False,
    "attention_layer_norm": False,
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_patch_merge_type": "spatial_unpad",
    "mm_spatial_pool_mode": "bilinear",
    "mm_spatial_pool_stride": 2,
}

#: A range of planes, from (columns x rows) tiles to (columns x rows).
_RANGE = re.compile(r"\((\d+)x(\d+)\).*\((\d+)x(\d+)\)")


def check_release(config: Mapping[str, Any]) -> None:
    """Refuse a release that the library's modules would compute differently.

    Raises:
        UserError: a value of config.json differs; the line names the first key.
    """
    for key, valid in _FIXED.items():
        if config.get(key, valid) != valid:
            raise UserError(
                f"config.json: {key}={config[key]!r} cannot be loaded; valid: {valid!r}"
            )


def text_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the text stack in config.json under the library's keys, without those it omits."""
    sizes: dict[str, Any] = {}
    for name, release_name in _SIZES.items():
        stated = [config[key] for key in release_name if config.get(key) is not None]
        if stated:
            sizes[name] = stated[0]
    if config.get("rope_theta") is not None:
        sizes["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": float(config["rope_theta"]),
        }
    return sizes


def planes(stated: str | Sequence[Sequence[int]], side: int) -> list[list[int]]:
    """Return the valid sizes of the plane of crops, in pixels, height before width.

    The order is kept, because the first of two equally good planes is used.

    Args:
        stated: `image_grid_pinpoints` of config.json, width before height: a list, its text, or a range of tile counts
            such as `(1x1),...,(6x6)`.
        side: pixels along the edge of a tile.

    Raises:
        UserError: another format.
    """
    if isinstance(stated, str) and (ends := _RANGE.search(stated)):
        left, top, right, bottom = map(int, ends.groups())
        return [
            [rows * side, columns * side]
            for columns in range(left, right + 1)
            for rows in range(top, bottom + 1)
        ]
    try:
        sizes = (
            json.loads(stated.replace("(", "[").replace(")", "]"))
            if isinstance(stated, str)
            else stated
        )
        return [[int(height), int(width)] for width, height in sizes]
    except FOREIGN as error:
        raise UserError(
            f"config.json: image_grid_pinpoints={stated!r} cannot be loaded; valid: a list of sizes in pixels"
        ) from error


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
        tokens: Tensor = super().pack_image_features([views], size[None], newline, ratio)[0][0]
        return tokens


class LladaVForConditionalGeneration(OnevisionVariant):
    """`LlavaOnevisionForConditionalGeneration` around a `LladaVModel`."""

    core: ClassVar[Any] = LladaVModel


class LladaVProcessor(LlavaOnevisionProcessor):
    """`LlavaOnevisionProcessor` with `bare_tokens` tokens for each of several pictures; None: the library's count."""

    bare_tokens: int | None = None

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        """Return the placeholders of one image."""
        number, pictures = 0, 0
        for number in image_inputs["batch_num_images"]:
            pictures += int(number)
            if image_idx < pictures:
                break
        if self.bare_tokens is not None and number != 1:
            placeholders: str = self.image_token * self.bare_tokens
            return placeholders
        return super().replace_image_token(image_inputs, image_idx, **kwargs)


class LladaVAdapter(LlavaOnevisionAdapter):
    """`LladaVForConditionalGeneration`: AnyRes for one image, one padded view for each of several (`SEVERAL`)."""

    data = replace(
        LlavaOnevisionAdapter.data,
        model_class=LladaVForConditionalGeneration,
        types=("llava_llada",),
        # The release's config.json belongs to remote code and does not describe the tower.
        self_described=False,
        renames=RENAMES,
        special=SPECIAL,
        # As in the release's evaluation, which requests short answers without reasoning.
        conversation="llada_no_think",
        joins={**JOINS, "flush": FLUSH},
        # As in the release's evaluation: one full stop at the end is dropped.
        clean=lambda text: text.removesuffix(".").strip(),
        settings={"several_pictures": ("", Annotated[str, OneOf(SEVERAL)] | None)},
        config=siglip_config(LlavaOnevisionConfig, "llama"),
    )
    processor_class: ClassVar[Any] = LladaVProcessor
    picture_class = LlavaOnevisionImageProcessorPil  # as the releases resize
    #: The class that reads the release's tokenizer.
    tokenizer_class: ClassVar[Any] = PreTrainedTokenizerFast

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Set what stands for each of several pictures."""
        super().__init__(model, processor, spec)
        self._bare_views = spec.processor.get("several_pictures") == "evaluation"
        model.model.bare_views = self._bare_views
        processor.bare_tokens = self._side**2 if self._bare_views else None

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return a processor with the checkpoint's tokenizer; its image settings are in remote code."""
        return cls.built_processor(cls.checkpoint_config(spec), cls._tokenizer(spec))

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the library's configuration with the values of the checkpoint's config.json.

        Values that it omits come from the model's config file.

        Raises:
            UserError: config.json states a different computation.
        """
        release = config_of(spec)
        check_release(release)
        text = {**spec.architecture.get("text", {}), **text_sizes(release)}
        stated = replace(spec, architecture={**spec.architecture, "text": text})
        config = cls.configuration(stated, cls._tokenizer(spec))
        if "image_grid_pinpoints" in release:
            config.image_grid_pinpoints = planes(
                release["image_grid_pinpoints"], config.vision_config.image_size
            )
        return config

    @classmethod
    def _tokenizer(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's tokenizer with the two placeholders, which the originals write as negative ids.

        Raises:
            UserError: the ids exceed the rows of the embedding.
        """
        tokenizer = load_part(spec, cls.tokenizer_class)
        tokenizer.add_tokens(["<image>", "<video>"], special_tokens=True)
        if len(tokenizer) > spec.facts.vocabulary:
            raise UserError(
                f"model={spec.name}: the tokenizer has {len(tokenizer)} tokens with <image> and <video>, the embedding "
                f"{spec.facts.vocabulary} rows (model.facts.vocabulary)"
            )
        return tokenizer
