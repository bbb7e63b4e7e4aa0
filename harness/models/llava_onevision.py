"""LLaVA-OneVision: AnyRes images up to nine crops, several images or a video at lower resolution, SigLIP and Qwen2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
)
from transformers.models.llava_onevision.modeling_llava_onevision import get_anyres_image_grid_shape

from espalier.harness.engine.tower_blocks import TowerBlock
from espalier.harness.engine.visual_items import Item
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.anyres import packed_item
from espalier.harness.models.chat_media import MARK
from espalier.harness.models.clip_blocks import clip_attention, clip_blocks, clip_unread
from espalier.harness.models.frame_pools import Pooling
from espalier.harness.models.loader import load_part
from espalier.harness.models.onevision_processor import build_processor, stackable
from espalier.harness.models.random_weights import text_config, vision_config
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox, padded

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


class LlavaOnevisionAdapter(Adapter):
    """`LlavaOnevisionForConditionalGeneration`: one image is AnyRes, each of several one tile, a video pooled frames.

    Newline tokens (after each row of crops, after each tile of several images, after a video) stay.
    """

    model_class: ClassVar[Any] = LlavaOnevisionForConditionalGeneration
    config_class: ClassVar[Any] = LlavaOnevisionConfig
    processor_class: ClassVar[Any] = LlavaOnevisionProcessor
    takes_video = True
    conversation: ClassVar[str] = "qwen_1_5"
    pieces = "alone"
    placeholders = (MARK, "<video>")
    lacking = ("luma",)  # tokens of large images and of video frames blend several patches
    patch_tokens: ClassVar[bool] = True

    #: Whether a newline token ends each row of each video frame, or a single one the whole video.
    row_newlines: ClassVar[bool] = False

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Read off the model how it pools video frames."""
        super().__init__(model, processor, spec)
        vision = model.config.vision_config
        self._side: int = vision.image_size // vision.patch_size
        self._pooling = Pooling.measure(self._pool, self._side**2)
        #: Tokens along the edge of one view of an image.
        self._view = self._side

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Load the checkpoint's."""
        return load_part(spec, AutoProcessor)

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """SigLIP, an MLP and Qwen2."""
        return cls.config_class(
            vision_config={
                "model_type": "siglip_vision_model",
                **vision_config(spec.facts.tower, spec),
            },
            text_config={"model_type": "qwen2", **text_config(spec, tokenizer)},
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
            **spec.architecture["model"],
        )

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """SigLIP's preprocessing, AnyRes for images."""
        return build_processor(cls.processor_class, cls.configuration(spec, tokenizer), tokenizer)

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return an encoder layer's attention."""
        return clip_attention(self.tower, self.model.config.vision_feature_layer, index)

    def unread_blocks(self) -> Sequence[nn.Module]:
        """Return the encoder's layers behind the one that `vision_feature_layer` names."""
        return clip_unread(self.tower, self.model.config.vision_feature_layer)

    def tower_blocks(self) -> Sequence[TowerBlock]:
        """Return the encoder's layers."""
        return clip_blocks(self.tower, self.model.config.vision_feature_layer)

    def pooling_attention(self) -> nn.MultiheadAttention:
        """Return the attention of SigLIP's pooling head, which the published checkpoints are without."""
        head = getattr(self.tower, "head", None)
        if head is None:
            return super().pooling_attention()
        attention: nn.MultiheadAttention = head.attention
        return attention

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor; frames are those of the clips, all of them.

        Raises:
            UserError: videos of different numbers of frames, which the model cannot stack.
        """
        frames = stackable([clip.pixels for row in clips for clip in row])
        return self.processor(
            text=texts,
            images=pictures if any(pictures) else None,
            videos=frames or None,
            do_sample_frames=False,
            padding=True,
            return_tensors="pt",
        )

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[Item]]:
        """Images before videos: the projector sees them in that order."""
        config, first = self.model.config, 0
        images: list[Item] = []
        if "pixel_values" in inputs:
            counts = inputs["batch_num_images"].tolist()
            lone = [count == 1 for count in counts for _ in range(count)]
            for size, single in zip(inputs["image_sizes"].cpu(), lone, strict=True):
                shape = (0, 0)
                if single:
                    shape = get_anyres_image_grid_shape(
                        size, config.image_grid_pinpoints, config.vision_config.image_size
                    )
                images.append(
                    packed_item(
                        partial(self._pack, size), shape, self._side, first, False, self._view
                    )
                )
                first += images[-1].work.units
        videos: list[Item] = []
        if "pixel_values_videos" in inputs:
            number, frames = inputs["pixel_values_videos"].shape[:2]
            for _ in range(number):
                videos.append(self._pooling.item(frames, first, self.row_newlines))
                first += videos[-1].work.units
        return {config.image_token_id: images, config.video_token_id: videos}

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the whole picture, stretched to a lone one's global view; crops, and each of several, are padded."""
        return WHOLE if view.only_picture and not view.index else padded(view)

    def _pack(self, size: Tensor, features: Tensor) -> Tensor:
        """Run the model's own packing on one image of `size` (height, width)."""
        packed, _ = self.model.model.pack_image_features(
            [features],
            size.unsqueeze(0),
            image_newline=torch.full(features.shape[-1:], torch.nan),
            vision_aspect_ratio=self.model.config.vision_aspect_ratio,
        )
        tokens: Tensor = packed[0]
        return tokens

    def _pool(self, features: Tensor) -> Tensor:
        """Run the model's own pooling of frames on (F, units, C)."""
        pooled: Tensor = self.model.model.apply_pooling(features)
        return pooled
