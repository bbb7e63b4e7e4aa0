"""Qwen's processors: building and running them, and bounds on the area of pictures and frames."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from espalier.harness.settings import Count, read_value

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.specs.run_spec import ModelSpec

#: Keys of `model.processor`: the part of the processor, and its bound on the area in pixels.
PICTURE_BOUNDS = {
    "min_pixels": ("image_processor", "shortest_edge"),
    "max_pixels": ("image_processor", "longest_edge"),
}
BOUNDS = {
    **PICTURE_BOUNDS,
    "video_min_pixels": ("video_processor", "shortest_edge"),
    "video_max_pixels": ("video_processor", "longest_edge"),
}

#: Key of `model.processor`: also bound each frame of a video, as in Qwen's package (qwen-vl-utils), which lmms-eval
#: uses. Checkpoints do not state it, and the library's default is off.
CAP = "cap_pixels_per_frame"


def new_processor(
    processor_class: Any,
    spec: ModelSpec,
    tokenizer: Any,
    image_class: Any = Qwen2VLImageProcessor,
    video_class: Any = Qwen2VLVideoProcessor,
    **colours: Any,
) -> Any:
    """Return a processor for the tower's patch size, for a model without a checkpoint.

    `colours` override the classes' mean and standard deviation of pictures and frames.
    """
    vision = spec.architecture["vision"]
    sizes = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }
    processor = processor_class(
        image_processor=image_class(**sizes, **colours),
        video_processor=video_class(**sizes, **colours),
        tokenizer=tokenizer,
    )
    return set_bounds(processor, spec)


def process_in_order(
    adapter: Adapter, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]
) -> Any:
    """Return one batch of prompts with the pictures and clips of each.

    The last frame of a clip with an odd number of frames is repeated, since two frames form one time step.
    """
    images, videos = list(chain(*pictures)), list(chain(*clips))
    batch = adapter.run_processor(
        texts,
        images=images or None,
        videos=[clip.pixels for clip in videos] or None,
        video_metadata=[clip.metadata() for clip in videos] or None,
        do_sample_frames=False,
    )
    if "second_per_grid_ts" in batch:
        # As numbers, because a tensor would be cast to the model's dtype, which rounds times to a few bits.
        batch["second_per_grid_ts"] = batch["second_per_grid_ts"].tolist()
    return batch


def set_bounds(processor: Any, spec: ModelSpec) -> Any:
    """Return the processor with the bounds of `model.processor`; other bounds stay unchanged."""
    videos, settings = processor.video_processor, dict(spec.processor)
    if hasattr(videos, CAP):
        cap = settings.pop(CAP, bool(videos.cap_pixels_per_frame))
        videos.cap_pixels_per_frame = read_value(f"model.processor.{CAP}", cap, bool)
    return _set_sizes(processor, settings)


def set_picture_bounds(processor: Any, spec: ModelSpec) -> Any:
    """Return a processor of pictures alone with the bounds of `model.processor`; other bounds stay unchanged."""
    return _set_sizes(processor, spec.processor)


def _set_sizes(processor: Any, settings: Mapping[str, Any]) -> Any:
    for key, value in settings.items():
        part, edge = BOUNDS[key]
        getattr(processor, part).size[edge] = read_value(f"model.processor.{key}", value, Count)
    return processor
