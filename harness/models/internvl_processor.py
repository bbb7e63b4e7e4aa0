"""InternVL's processor: building one without a checkpoint and running it; the family's text stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    GotOcr2ImageProcessorPil,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from espalier.harness.errors import UserError

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.specs.run_spec import ModelSpec

#: The processor's names for special tokens.
TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

#: Keys of `model.processor` for tiling.
TILES = ("crop_to_patches", "min_patches", "max_patches")

#: Default of `model.processor.frame_label`: text before each frame of a video, `{}` for its number.
FRAME = "Frame{}: "

#: Supported `text_config.model_type`: FLOPs are counted and layers run on reduced sequences.
TEXTS = ("qwen2", "qwen3", "llama", "phi3")


def known_text(config: Any, spec: ModelSpec) -> Any:
    """Return a model's configuration.

    Raises:
        UserError: the text stack is not one of TEXTS.
    """
    model_type = config.text_config.model_type
    if model_type not in TEXTS:
        raise UserError(
            f"model={spec.name}: its text stack is of type {model_type!r}; valid: {', '.join(TEXTS)}"
        )
    return config


def build_processor(spec: ModelSpec, tokenizer: Any) -> Any:
    """Return a processor with tiles of the tower's size and ImageNet's normalisation."""
    side = spec.architecture["vision"]["image_size"]
    images = GotOcr2ImageProcessorPil(
        size={"height": side, "width": side},
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
        **tile_settings(spec),
    )
    return InternVLProcessor(
        image_processor=images,
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map, **TOKENS
        ),
        video_processor=frames_like(images),
        image_seq_length=spec.architecture["model"]["image_seq_length"],
    )


def tile_settings(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of `model.processor` that belong to the image processor."""
    return {name: spec.processor[name] for name in TILES if name in spec.processor}


def frames_like(images: Any) -> Any:
    """Return a video processor that processes each frame as `images` processes one tile."""
    return InternVLVideoProcessor(
        size=images.size, image_mean=images.image_mean, image_std=images.image_std
    )


def label_frames(processor: Any, label: str) -> None:
    """Make a processor write `label` before each frame of a video, with the frame's number, from 1, for `{}`.

    Raises:
        UserError: the label has no `{}`.
    """
    if label == FRAME:
        return
    if "{}" not in label:
        raise UserError(
            f"model.processor.frame_label={label!r} has no {{}} for a frame's number; valid: {FRAME!r}"
        )
    placeholders = processor.image_token * processor.image_seq_length
    frame = f"{processor.start_image_token}{placeholders}{processor.end_image_token}"

    def frame_labels(video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        del kwargs
        count = video_inputs["pixel_values_videos"][video_idx].shape[0]
        return "\n".join(label.replace("{}", str(i + 1)) + frame for i in range(count))

    processor.replace_video_token = frame_labels


def process_chat(adapter: Adapter, text: str, pictures: list[Any], clips: list[Any]) -> Any:
    """Run the processor on one prompt with its pictures and clips.

    Raises:
        UserError: clips of different lengths.
    """
    processor, spec = adapter.processor, adapter.spec
    counts = sorted({len(clip.frames) for clip in clips})
    if len(counts) > 1:
        raise UserError(
            f"one chat holds videos of {counts[0]} and {counts[-1]} frames; model={spec.name!r} takes videos of "
            "equal length in a chat; valid: a smaller model.video.frames"
        )
    size = processor.image_processor.size
    # Passed in the call because the library's defaults would otherwise override `model.processor`.
    tiles = {"crop_to_patches": spec.processor.get("crop_to_patches", True)}
    together = spec.processor.get("patches_together")
    if together is not None and pictures:
        limit = min(processor.image_processor.max_patches, together // len(pictures))
        tiles["max_patches"] = max(limit, 1)
    return adapter.run_processor(
        [text],
        images=pictures or None,
        videos=[clip.resized(size["width"], size["height"]) for clip in clips] or None,
        images_kwargs=tiles,
        videos_kwargs={"do_sample_frames": False},
    )
