"""The processor of LLaVA-OneVision and LLaVA-Video, built from a configuration."""

from __future__ import annotations

from typing import Any

from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionVideoProcessor

from espalier.harness.errors import UserError

#: Mean and standard deviation of SigLIP's pixels.
HALF = [0.5, 0.5, 0.5]


def build_processor(
    processor_class: Any,
    config: Any,
    tokenizer: Any,
    picture_class: Any = LlavaOnevisionImageProcessor,
) -> Any:
    """Return a processor that fits a configuration of the family; `picture_class` resizes images."""
    side = config.vision_config.image_size
    size = {"height": side, "width": side}
    pixels: dict[str, Any] = {"size": size, "image_mean": HALF, "image_std": HALF}
    return processor_class(
        image_processor=picture_class(**pixels, image_grid_pinpoints=config.image_grid_pinpoints),
        video_processor=LlavaOnevisionVideoProcessor(**pixels),
        tokenizer=tokenizer,
        num_image_tokens=(side // config.vision_config.patch_size) ** 2,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        vision_aspect_ratio=config.vision_aspect_ratio,
    )


def stackable(videos: list[Any]) -> list[Any]:
    """Return the frames of a batch's videos, each (F, H, W, 3).

    Raises:
        UserError: videos of different numbers of frames, which the model cannot stack.
    """
    counts = sorted({len(frames) for frames in videos})
    if len(counts) > 1:
        raise UserError(
            f"model.video.frames: videos of {counts[0]} and {counts[-1]} frames meet in one batch, which this model "
            "cannot stack; valid: engine.batch_size=1, model.video.short=error"
        )
    return videos
