"""Releases in LLaVA's format, loaded under their tensor names: LLaVA-OneVision, LLaVA-Video, LLaDA-V and LaViDa.

They have LLaVA-OneVision's modules; transformers lacks the architectures of the last three. Their config.json belongs
to remote code and does not describe the tower: what it omits comes from the model's file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionModel,
    LlavaOnevisionProcessor,
)
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionPreTrainedModel,
    get_anyres_image_grid_shape,
    unpad_image,
)

from espalier.harness.errors import UserError, foreign
from espalier.harness.models.architectures.anyres_views import OnevisionViewsAdapter
from espalier.harness.models.loader import config_of, require_settings
from espalier.harness.specs.run_spec import ModelSpec

#: From patterns of the releases' tensor names to the library's; a name changes at most once.
RENAMES = {
    r"^model\.(embed_tokens|layers|norm)\.": r"model.language_model.\1.",
    r"^model\.vision_tower\.vision_tower\.vision_model\.": "model.vision_tower.",
    r"^model\.mm_projector\.0\.": "model.multi_modal_projector.linear_1.",
    r"^model\.mm_projector\.2\.": "model.multi_modal_projector.linear_2.",
}

_LAYER = r"^model\.transformer\.blocks\.(\d+)\."
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

#: The same for releases with LLaDA.
LLADA_RENAMES = {
    **{
        rf"{_LAYER}{old}\.": rf"model.language_model.layers.\1.{new}."
        for old, new in _BLOCK.items()
    },
    r"^model\.transformer\.wte\.": "model.language_model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.language_model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    **RENAMES,
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
FIXED: Mapping[str, Any] = {
    "rope_scaling": None,
    "use_sliding_window": False,
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_patch_merge_type": "spatial_unpad",
    "mm_spatial_pool_stride": 2,
}

#: The same for releases with Qwen2.
QWEN2_FIXED: Mapping[str, Any] = {
    **FIXED,
    "mm_resampler_type": None,
    "mm_use_im_start_end": False,
    "mm_use_im_patch_token": False,
    "mm_vision_select_feature": "patch",
}

#: The same for releases with LLaDA.
LLADA_FIXED: Mapping[str, Any] = {
    **FIXED,
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

#: A range of planes, from (columns x rows) tiles to (columns x rows).
_RANGE = re.compile(r"\((\d+)x(\d+)\).*\((\d+)x(\d+)\)")


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
    problem = f"config.json: image_grid_pinpoints={stated!r} cannot be loaded"
    with foreign(problem, "a list of sizes in pixels"):
        sizes = (
            json.loads(stated.replace("(", "[").replace(")", "]"))
            if isinstance(stated, str)
            else stated
        )
        return [[int(height), int(width)] for width, height in sizes]


class ReleasedAdapter(OnevisionViewsAdapter):
    """A family with LLaVA-OneVision's vision side that is loaded from its release, or from the library's format."""

    @classmethod
    def is_release(cls, spec: ModelSpec) -> bool:
        """Return whether a checkpoint has its release's format, not the library's."""
        library_type = cls.data.model_class.config_class.model_type
        return bool(config_of(spec).get("model_type") != library_type)

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return a processor with the checkpoint's tokenizer; image settings of a release are in remote code."""
        if not cls.is_release(spec):
            return super().load_processor(spec)
        return cls.built_processor(cls.checkpoint_config(spec), cls.read_tokenizer(spec))

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the library's configuration with the values of the checkpoint's config.json.

        Values that a release omits come from the model's config file.

        Raises:
            UserError: config.json states a different computation, or there is no model's file.
        """
        if not cls.is_release(spec):
            return super().checkpoint_config(spec)
        if not spec.architecture:
            raise UserError(
                f"model={spec.name}: the release's config.json does not describe its tower; valid: "
                "model=llava_video_7b with model.path=<this folder>, for LLaVA-OneVision model=llava_ov_7b"
            )
        release = config_of(spec)
        require_settings(release, cls.data.fixed)
        text = {**spec.architecture.get("text", {}), **text_sizes(release)}
        stated = replace(spec, architecture={**spec.architecture, "text": text})
        config = cls.configuration(stated, cls.read_tokenizer(spec))
        if "image_grid_pinpoints" in release:
            config.image_grid_pinpoints = planes(
                release["image_grid_pinpoints"], config.vision_config.image_size
            )
        return config

    @classmethod
    def read_tokenizer(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's tokenizer with the two placeholders, which the originals write as negative ids.

        Raises:
            UserError: the ids exceed the rows of the embedding.
        """
        tokenizer = cls.data.tokenizer(spec)
        tokenizer.add_tokens(["<image>", "<video>"], special_tokens=True)
        if spec.architecture and len(tokenizer) > spec.facts.vocabulary:
            raise UserError(
                f"model={spec.name}: the tokenizer has {len(tokenizer)} tokens with <image> and <video>, the embedding "
                f"{spec.facts.vocabulary} rows (model.facts.vocabulary)"
            )
        return tokenizer


class OnevisionVariant(LlavaOnevisionForConditionalGeneration):
    """`LlavaOnevisionForConditionalGeneration` around another class of modules, `core`."""

    core: ClassVar[Any]

    def __init__(self, config: Any) -> None:
        """Build the modules without the parent's constructor, which would build LLaVA-OneVision's in vain."""
        LlavaOnevisionPreTrainedModel.__init__(self, config)
        text = config.text_config
        self.model = self.core(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()


#: Pooling of 2 x 2 features of a frame; `average` drops an odd last row and column, `bilinear` does not.
POOLINGS = ("average", "bilinear")


class LlavaVideoConfig(LlavaOnevisionConfig):
    """LLaVA-OneVision's configuration and `video_pooling`, one of POOLINGS."""

    model_type = "llava_video"

    video_pooling: str = POOLINGS[0]


class LlavaVideoModel(LlavaOnevisionModel):
    """`LlavaOnevisionModel` with LLaVA-Video's pooling and newlines of video frames."""

    config: LlavaVideoConfig

    def pool(self, features: Tensor) -> Tensor:
        """Pool frames (F, units, C) to (F, tokens, C)."""
        if self.config.video_pooling == "bilinear":
            return cast("Tensor", super().apply_pooling(features))
        vision: Any = self.config.vision_config
        side = vision.image_size // vision.patch_size
        plane = features.transpose(1, 2).unflatten(2, (side, side))
        return avg_pool2d(plane, 2).flatten(2).transpose(1, 2)

    def apply_pooling(self, image_features: Tensor) -> Tensor:
        """Pool frames (F, units, C) and add a newline after each row: (F, rows (rows + 1), C)."""
        pooled = self.pool(image_features)
        side = round(pooled.shape[1] ** 0.5)
        rows = pooled.unflatten(1, (side, side))
        newline = self.image_newline.to(rows).expand(*rows.shape[:2], 1, -1)
        return torch.cat([rows, newline], dim=2).flatten(1, 2)

    def get_video_features(
        self,
        pixel_values_videos: Tensor,
        vision_feature_layer: int | list[int] | None = None,
        vision_feature_select_strategy: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Encode videos without LLaVA-OneVision's single newline at the end."""
        output = super().get_video_features(
            pixel_values_videos,
            vision_feature_layer=vision_feature_layer,
            vision_feature_select_strategy=vision_feature_select_strategy,
            **{**kwargs, "return_dict": True},
        )
        output.pooler_output = output.pooler_output[:, :-1]
        return output


class LlavaVideoForConditionalGeneration(OnevisionVariant):
    """`LlavaOnevisionForConditionalGeneration` around a `LlavaVideoModel`."""

    config: LlavaVideoConfig
    config_class = LlavaVideoConfig

    core = LlavaVideoModel


class LlavaVideoProcessor(LlavaOnevisionProcessor):
    """`LlavaOnevisionProcessor` with LLaVA-Video's number of placeholders."""

    #: Placeholders per frame; set by the adapter.
    frame_tokens: int

    def replace_video_token(self, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        """Return the placeholders of one video."""
        placeholders: str = self.video_token * self.frame_tokens
        return placeholders * len(video_inputs["pixel_values_videos"][video_idx])


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


class LavidaModel(LladaVModel):
    """`LladaVModel` with images pooled 2 x 2 like its video frames, and without shrinking planes."""

    def packed(self, views: Tensor, size: Any, newline: Tensor, ratio: str | None) -> Tensor:
        """Return the tokens of one image from its views (V, patches, D), each pooled."""
        views = self.apply_pooling(views)
        global_view, tiles = views[0], views[1:]
        if not len(tiles):
            return torch.cat([global_view, newline[None]])
        config: Any = self.config
        rows, columns = get_anyres_image_grid_shape(
            size, config.image_grid_pinpoints, config.vision_config.image_size
        )
        side = isqrt(len(global_view))
        tiled = tiles.view(rows, columns, side, side, -1)
        plane = tiled.permute(4, 0, 2, 1, 3).reshape(-1, rows * side, columns * side)
        plane = unpad_image(plane, size)
        ends = newline[:, None, None].expand(-1, plane.shape[1], 1)
        return torch.cat([global_view, torch.cat([plane, ends], dim=2).flatten(1).T])


class LavidaForConditionalGeneration(LladaVForConditionalGeneration):
    """`LladaVForConditionalGeneration` around a `LavidaModel`."""

    core = LavidaModel


class LavidaProcessor(LladaVProcessor):
    """`LladaVProcessor` with `num_image_tokens` tokens, those of a pooled view, per frame and image view."""

    def replace_video_token(self, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        """Return the placeholders of one video: those of its frames, then one for the newline."""
        frames = len(video_inputs["pixel_values_videos"][video_idx])
        return str(self.video_token * (frames * self.num_image_tokens + 1))
