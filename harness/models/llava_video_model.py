"""The architecture of LLaVA-Video, which transformers lacks: LLaVA-OneVision with another video layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionModel,
)
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionPreTrainedModel,
)

#: Pooling of 2 x 2 features of a frame; `average` drops an odd last row and column, `bilinear` does not.
POOLINGS = ("average", "bilinear")


class LlavaVideoConfig(LlavaOnevisionConfig):
    """LLaVA-OneVision's configuration and `video_pooling`, one of POOLINGS."""

    model_type = "llava_video"

    video_pooling: str = POOLINGS[0]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Raise ValueError for a configuration of another model or of the original release, not use defaults."""
        model_type = config_dict.get("model_type")
        if model_type != cls.model_type:
            raise ValueError(
                f"its config.json has model_type={model_type!r} instead of {cls.model_type!r}"
            )
        return super().from_dict(config_dict, **kwargs)


class LlavaVideoModel(LlavaOnevisionModel):
    """`LlavaOnevisionModel` with LLaVA-Video's pooling and newlines of video frames."""

    config: LlavaVideoConfig

    def pool(self, features: Tensor) -> Tensor:
        """Pool frames (F, units, C) to (F, tokens, C)."""
        if self.config.video_pooling == "bilinear":
            shrunk: Tensor = super().apply_pooling(features)
            return shrunk
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


class LlavaVideoForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    """`LlavaOnevisionForConditionalGeneration` around a `LlavaVideoModel`."""

    config: LlavaVideoConfig
    config_class = LlavaVideoConfig

    def __init__(self, config: LlavaVideoConfig) -> None:
        """Build the modules without the parent's constructor, which would build LLaVA-OneVision's in vain."""
        LlavaOnevisionPreTrainedModel.__init__(self, config)
        text: Any = config.text_config
        self.model = LlavaVideoModel(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()
