"""LaViDa: LLaDA-V's modules with SigLIP, up to four tiles per image, each view pooled to a quarter of its patches.

transformers lacks this architecture: LLaVA-OneVision with views pooled before stitching. The text stack is LLaDA's, or
Dream's: Qwen2's blocks with bidirectional attention, under Qwen2's tensor names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil, isqrt
from typing import Any

import torch
from torch import Tensor
from transformers import LlavaOnevisionConfig, Qwen2Tokenizer
from transformers.models.llava_onevision.modeling_llava_onevision import (
    get_anyres_image_grid_shape,
    unpad_image,
)

from espalier.harness.models.conversations import JOINS
from espalier.harness.models.llada_v import (
    LladaVAdapter,
    LladaVForConditionalGeneration,
    LladaVModel,
    LladaVProcessor,
)
from espalier.harness.models.llava_onevision import siglip_config
from espalier.harness.models.loader import load_part
from espalier.harness.specs.run_spec import ModelSpec


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


class LavidaAdapter(LladaVAdapter):
    """`LavidaForConditionalGeneration`: pooled views, stitched, unpadded, a newline token after each row."""

    data = replace(
        LladaVAdapter.data,
        model_class=LavidaForConditionalGeneration,
        processor_class=LavidaProcessor,
        conversation="llada",
        patch_tokens=False,  # a token is the mean of several patches
        # As in the release's evaluation: leading exclamation marks are dropped.
        clean=lambda text: text.lstrip("!").strip(),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Measure the number of tokens of a pooled view."""
        super().__init__(model, processor, spec)
        self._view = self._pooling.side

    @classmethod
    def built_processor(cls, config: Any, tokenizer: Any) -> Any:
        """Return the processor of a configuration, which counts pooled tokens."""
        processor = super().built_processor(config, tokenizer)
        side = config.vision_config.image_size // config.vision_config.patch_size
        processor.num_image_tokens = ceil(side / 2) ** 2
        return processor


#: Dream's special tokens: padding, begin, end, placeholders, marks of turns, and the mask token.
DREAM_SPECIAL = (
    *("<|endoftext|>", "<|beginoftext|>", "<|endoftext|>", "<image>", "<video>"),
    *("<|im_start|>", "<|im_end|>", "<|mask|>"),
)


class LavidaDreamAdapter(LavidaAdapter):
    """`LavidaForConditionalGeneration` around Qwen2's modules; Dream's code adds two tokens to Qwen2's tokenizer."""

    data = replace(
        LavidaAdapter.data,
        types=("llava_dream",),
        tokenizer=partial(load_part, part_class=Qwen2Tokenizer),
        special=DREAM_SPECIAL,
        conversation="dream",
        joins=JOINS,
        config=siglip_config(LlavaOnevisionConfig, "qwen2"),
    )
