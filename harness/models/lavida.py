"""LaViDa: LLaDA-V's parts with SigLIP, up to four tiles an image, every view pooled to a quarter of its patches."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from transformers import LlavaOnevisionProcessor

from espalier.harness.models.adapter import Adapter
from espalier.harness.models.lavida_model import LavidaForConditionalGeneration
from espalier.harness.models.llada_v import LladaVAdapter

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


class LavidaProcessor(LlavaOnevisionProcessor):
    """`LlavaOnevisionProcessor` that counts the tokens of a pooled view, `num_image_tokens`, of frames as of images."""

    def replace_video_token(self, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        """Return the placeholders of one video: its frames, then a newline."""
        del kwargs
        frames = len(video_inputs["pixel_values_videos"][video_idx])
        placeholders: str = self.video_token * (frames * self.num_image_tokens + 1)
        return placeholders


class LavidaAdapter(LladaVAdapter):
    """`LavidaForConditionalGeneration`: pooled views, stitched, unpadded, a newline token after each row."""

    model_class = LavidaForConditionalGeneration
    processor_class = LavidaProcessor
    conversation: ClassVar[str] = "llada"
    patch_tokens = False  # a token is the mean of several patches

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Read off the model how many tokens a pooled view has."""
        super().__init__(model, processor, spec)
        self._view = self._pooling.side

    @classmethod
    def built_processor(cls, config: Any, tokenizer: Any) -> Any:
        """Return the processor that fits a configuration, counting pooled tokens."""
        processor = super().built_processor(config, tokenizer)
        side = config.vision_config.image_size // config.vision_config.patch_size
        processor.num_image_tokens = ceil(side / 2) ** 2
        return processor

    def decode(self, ids: Tensor) -> list[str]:
        """Turn new tokens into answers without exclamation marks ahead, as the release's evaluation does."""
        return [text.lstrip("!").strip() for text in Adapter.decode(self, ids)]
