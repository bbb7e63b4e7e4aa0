"""Qwen's processors: how they are built and run, and how large pictures and frames may be."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from espalier.harness.settings import Count, read_value

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Keys of `model.processor`: the part of the processor and the bound of its pictures' area, in pixels.
BOUNDS = {
    "min_pixels": ("image_processor", "shortest_edge"),
    "max_pixels": ("image_processor", "longest_edge"),
    "video_min_pixels": ("video_processor", "shortest_edge"),
    "video_max_pixels": ("video_processor", "longest_edge"),
}

#: Key of `model.processor`: whether each frame of a video is bounded, too, as in Qwen's own package (qwen-vl-utils),
#: which lmms-eval runs. No checkpoint states it; the library's processors bound frames only if it is asked for.
CAP = "cap_pixels_per_frame"


def new_processor(
    processor_class: Any,
    spec: ModelSpec,
    tokenizer: Any,
    video_class: Any = Qwen2VLVideoProcessor,
    **colours: Any,
) -> Any:
    """Return a processor for the tower's patches, for a model without a checkpoint.

    `colours` are what pictures and frames are normalised by where that is not the classes' own.
    """
    vision = spec.architecture["vision"]
    sizes = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }
    processor = processor_class(
        image_processor=Qwen2VLImageProcessor(**sizes, **colours),
        video_processor=video_class(**sizes, **colours),
        tokenizer=tokenizer,
    )
    return bounded(processor, spec)


def run_processor(
    processor: Any, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]
) -> Any:
    """Turn prompts, and the pictures and clips of each, into one batch.

    The last frame of a clip with an odd number of frames is doubled, as two frames make one token in time.
    """
    images, videos = list(chain(*pictures)), list(chain(*clips))
    batch = processor(
        text=texts,
        images=images or None,
        videos=[clip.pixels for clip in videos] or None,
        video_metadata=[clip.metadata() for clip in videos] or None,
        do_sample_frames=False,
        padding=True,
        return_tensors="pt",
    )
    if "second_per_grid_ts" in batch:
        # As numbers: a tensor would take the model's dtype, and time would be rounded to a few bits.
        batch["second_per_grid_ts"] = batch["second_per_grid_ts"].tolist()
    return batch


def bounded(processor: Any, spec: ModelSpec) -> Any:
    """Set what `model.processor` says of picture sizes; the rest stays as the processor has it."""
    videos = processor.video_processor
    settings = {CAP: bool(getattr(videos, CAP, None)), **spec.processor}
    videos.cap_pixels_per_frame = read_value(f"model.processor.{CAP}", settings.pop(CAP), bool)
    for key, value in settings.items():
        part, edge = BOUNDS[key]
        getattr(processor, part).size[edge] = read_value(f"model.processor.{key}", value, Count)
    return processor
