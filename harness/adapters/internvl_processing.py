"""InternVL's processor without a checkpoint, how it is run, and which text stacks the family has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.specs import ModelSpec

#: What the processor calls the special tokens.
TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

#: Text stacks, as `text_config.model_type` names them, whose arithmetic is counted and whose layers can be shortened.
TEXTS = ("qwen2", "qwen3", "llama", "phi3")


def known_text(config: Any, spec: ModelSpec) -> Any:
    """Return a model's configuration.

    Raises:
        UserError: its text stack is none of TEXTS.
    """
    kind = config.text_config.model_type
    if kind not in TEXTS:
        raise UserError(
            f"model={spec.name}: its text stack is of type {kind!r}; valid: {', '.join(TEXTS)}"
        )
    return config


def build_processor(spec: ModelSpec, tokenizer: Any) -> Any:
    """Return a processor of tiles of the tower's size, with ImageNet's colours."""
    side = spec.architecture["vision"]["image_size"]
    images = GotOcr2ImageProcessor(
        size={"height": side, "width": side},
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
        **spec.processor,
    )
    return InternVLProcessor(
        image_processor=images,
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map, **TOKENS
        ),
        video_processor=frames_like(images),
        image_seq_length=spec.architecture["model"]["image_seq_length"],
    )


def frames_like(images: Any) -> Any:
    """Return a video processor that treats every frame as `images` treats one tile."""
    return InternVLVideoProcessor(
        size=images.size, image_mean=images.image_mean, image_std=images.image_std
    )


def process_chat(
    processor: Any, spec: ModelSpec, text: str, pictures: list[Any], clips: list[Any]
) -> Any:
    """Run the processor on one prompt with its pictures and clips.

    Raises:
        UserError: clips of different lengths.
    """
    counts = sorted({len(clip.frames) for clip in clips})
    if len(counts) > 1:
        raise UserError(
            f"one chat holds videos of {counts[0]} and {counts[-1]} frames; model={spec.name!r} takes videos of as "
            "many frames in a chat; valid: a smaller model.video.frames"
        )
    return processor(
        text=[text],
        images=pictures or None,
        videos=[clip.frames for clip in clips] or None,
        # Named here because the library's processor would otherwise overrule `model.processor`.
        images_kwargs={"crop_to_patches": spec.processor.get("crop_to_patches", True)},
        videos_kwargs={"do_sample_frames": False},
        return_tensors="pt",
    )
