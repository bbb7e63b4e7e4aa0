"""Architectures with LLaVA-OneVision's modules that transformers lacks: LLaVA-Video, LLaDA-V and LaViDa."""

from __future__ import annotations

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
