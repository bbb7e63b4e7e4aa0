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

from espalier.harness.errors import UserError

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: What the processor calls the special tokens.
TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

#: What `model.processor` may hold of how a picture is cut.
TILES = ("crop_to_patches", "min_patches", "max_patches")

#: What stands before each frame of a video, `{}` for its number; `model.processor.frame_label` may name something else.
FRAME = "Frame{}: "

#: Text stacks, as `text_config.model_type` names them, whose arithmetic is counted and whose layers can be shortened.
TEXTS = ("qwen2", "qwen3", "llama", "phi3")


def known_text(config: Any, spec: ModelSpec) -> Any:
    """Return a model's configuration.

    Raises:
        UserError: its text stack is none of TEXTS.
    """
    model_type = config.text_config.model_type
    if model_type not in TEXTS:
        raise UserError(
            f"model={spec.name}: its text stack is of type {model_type!r}; valid: {', '.join(TEXTS)}"
        )
    return config


def build_processor(spec: ModelSpec, tokenizer: Any) -> Any:
    """Return a processor of tiles of the tower's size, with ImageNet's colours."""
    side = spec.architecture["vision"]["image_size"]
    images = GotOcr2ImageProcessor(
        size={"height": side, "width": side},
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
        **tiles_of(spec),
    )
    return InternVLProcessor(
        image_processor=images,
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map, **TOKENS
        ),
        video_processor=frames_like(images),
        image_seq_length=spec.architecture["model"]["image_seq_length"],
    )


def tiles_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the settings of `model.processor` that are the image processor's own."""
    return {name: spec.processor[name] for name in TILES if name in spec.processor}


def frames_like(images: Any) -> Any:
    """Return a video processor that treats every frame as `images` treats one tile."""
    return InternVLVideoProcessor(
        size=images.size, image_mean=images.image_mean, image_std=images.image_std
    )


def label_frames(processor: Any, label: str) -> None:
    """Let a processor write `label` before each frame of a video, with the frame's number for `{}`, counted from 1.

    Raises:
        UserError: no place for the number.
    """
    if label == FRAME:
        return
    if "{}" not in label:
        raise UserError(
            f"model.processor.frame_label={label!r} has no place for a frame's number; valid: {FRAME!r}"
        )
    placeholders = processor.image_token * processor.image_seq_length
    frame = f"{processor.start_image_token}{placeholders}{processor.end_image_token}"

    def frame_labels(video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        del kwargs
        count = video_inputs["pixel_values_videos"][video_idx].shape[0]
        return "\n".join(label.replace("{}", str(i + 1)) + frame for i in range(count))

    processor.replace_video_token = frame_labels


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
    # Named here because the library's processor would otherwise overrule `model.processor`.
    tiles = {"crop_to_patches": spec.processor.get("crop_to_patches", True)}
    together = spec.processor.get("patches_together")
    if together is not None and pictures:
        limit = min(processor.image_processor.max_patches, together // len(pictures))
        tiles["max_patches"] = max(limit, 1)
    return processor(
        text=[text],
        images=pictures or None,
        videos=[clip.pixels for clip in clips] or None,
        images_kwargs=tiles,
        videos_kwargs={"do_sample_frames": False},
        return_tensors="pt",
    )
