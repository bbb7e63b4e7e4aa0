"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images, videos, and both in one batch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import av
import numpy as np

from espalier.harness.cost.facts import LinearFacts
from espalier.harness.specs.run_spec import VideoSpec
from tests.tiny import DEPTH, TEXT, Family, StackFacts, chat, picture, tiny_spec

VISION = {"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROPE = {"rope_type": "default", "rope_theta": 1.0e4, "mrope_section": [1, 1, 2]}
PIXELS = {"min_pixels": 14 * 14, "max_pixels": 100 * 100}
BOUNDS = {**PIXELS, **{f"video_{key}": value for key, value in PIXELS.items()}}

QWEN2 = tiny_spec(
    "qwen2_vl",
    text=TEXT,
    tower=StackFacts(2, 32, 64, 4, 4, 8, gated=False, causal=False),
    projector=(128, 128, 32),
    class_attention="mean",
    rotary_axes=3,
    processor=BOUNDS,
    video=VideoSpec(frames=6, rule="fps"),
    architecture={"text": {"rope_parameters": ROPE}, "vision": VISION},
)

#: Entries in the caches of a stack with linear attention in every other layer.
LINEAR = tuple(float("inf") if layer % 2 else 0 for layer in range(DEPTH))
#: Three layers: four heads of 8 x 12, and four tokens of the convolution's 80 channels.
STATES = 3 * 8 * (4 * 8 * 12 + 4 * 80)

#: Windows of 2x2 units, in every other block.
QWEN25 = replace(
    QWEN2,
    adapter="qwen2_5_vl",
    facts=replace(
        QWEN2.facts,
        tower=StackFacts(4, 32, 48, 4, 4, 8, gated=True, causal=False, window_layers=2),
    ),
    architecture={
        "text": {"rope_parameters": ROPE},
        "vision": {**VISION, "window_size": 28, "tokens_per_second": 2},
    },
)


#: Heads whose width is not the hidden width's share, and features of three blocks for the first three decoder layers.
QWEN3 = replace(
    QWEN2,
    adapter="qwen3_vl",
    facts=replace(
        QWEN2.facts,
        text=replace(TEXT, head_dim=16),
        tower=StackFacts(4, 32, 48, 4, 4, 8, gated=False, causal=False),
        deepstack=(0, 1, 2),
    ),
    architecture={
        "text": {
            "head_dim": 16,
            "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision": {**VISION, "num_position_embeddings": 16},
    },
)

#: 2 of 4 experts of width 24.
QWEN3_MOE = replace(
    QWEN3,
    adapter="qwen3_vl_moe",
    facts=replace(QWEN3.facts, text=replace(QWEN3.facts.text, experts=4)),
    architecture={
        **QWEN3.architecture,
        "text": {
            **QWEN3.architecture["text"],
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        },
    },
)

#: Layers 1 and 3 are full; heads of linear layers have other widths, and two heads of values to each of keys.
QWEN35 = replace(
    QWEN2,
    adapter="qwen3_5",
    facts=replace(
        QWEN2.facts,
        text=replace(TEXT, head_dim=16, linear=LinearFacts(2, 2, 4, 8, 12)),
        tower=StackFacts(2, 32, 48, 4, 4, 8, gated=False, causal=False),
    ),
    architecture={
        "text": {
            "rope_parameters": {
                **ROPE,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
            },
        },
        "vision": {**VISION, "num_position_embeddings": 16},
    },
)

#: 2 of 4 experts of width 16, and a shared one of width 16 with a gate, which counts as the fifth.
QWEN35_MOE = replace(
    QWEN35,
    adapter="qwen3_5_moe",
    facts=replace(QWEN35.facts, text=replace(QWEN35.facts.text, experts=5)),
    architecture={
        **QWEN35.architecture,
        "text": {
            **QWEN35.architecture["text"],
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "shared_expert_intermediate_size": 16,
        },
    },
)


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="espalier-clips-")


def write_clip(path: Path, frames: int, height: int, width: int, fps: int = 8) -> str:
    """Write a video whose frames all differ."""
    generator = np.random.default_rng(frames)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for _ in range(frames):
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


def clip(frames: int, height: int, width: int) -> dict[str, str]:
    """The part of a chat that holds a video of 8 frames a second."""
    path = Path(folder().name) / f"{frames}x{height}x{width}.mp4"
    return {
        "type": "video",
        "video": str(path) if path.exists() else write_clip(path, frames, height, width),
    }


def video_chat(text: str, *parts: dict) -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


#: 3x4, 2x4 and 4x3, 5x2 units: windows are cut off at the border, and tokens differ in number.
IMAGES = (
    chat("w1 w2 w3", picture(0, 56, 42)),
    chat("w4", picture(1, 56, 28), picture(2, 42, 56)),
    chat("w5 w6 w7 w8 w9", picture(3, 28, 70)),
)

#: 4 frames (half a second), then 6 of 40, then 4 of 12: at 2 frames a second, at least 4, at most 6.
VIDEOS = (
    video_chat("w1 w2 w3", clip(5, 42, 56)),
    video_chat("w4", clip(40, 28, 42)),
    video_chat("w5 w6 w7 w8 w9", clip(12, 56, 28)),
)

#: In the first chat the video stands before the images, which the tower sees first.
MIXED = (
    video_chat("w1", clip(5, 28, 42), {"type": "image", "image": picture(4, 42, 42)}),
    chat("w2 w3", picture(5, 28, 42)),
    video_chat("w4 w5 w6", {"type": "image", "image": picture(6, 42, 28)}, clip(12, 42, 42)),
)

FAMILIES = {
    "qwen2_vl": Family(QWEN2, IMAGES),
    "qwen2_vl_video": Family(QWEN2, VIDEOS),
    "qwen2_5_vl": Family(QWEN25, IMAGES),
    "qwen2_5_vl_video": Family(QWEN25, VIDEOS),
    "qwen2_5_vl_mixed": Family(QWEN25, MIXED),
    "qwen3_vl": Family(QWEN3, IMAGES),
    "qwen3_vl_video": Family(QWEN3, VIDEOS),
    "qwen3_vl_mixed": Family(QWEN3, MIXED),
    "qwen3_vl_moe": Family(QWEN3_MOE, IMAGES),
    "qwen3_vl_moe_mixed": Family(QWEN3_MOE, MIXED),
    "qwen3_5": Family(QWEN35, IMAGES, most=LINEAR, states=STATES),
    "qwen3_5_video": Family(QWEN35, VIDEOS, most=LINEAR, states=STATES),
    "qwen3_5_mixed": Family(QWEN35, MIXED, most=LINEAR, states=STATES),
    "qwen3_5_moe": Family(QWEN35_MOE, IMAGES, most=LINEAR, states=STATES),
    "qwen3_5_moe_mixed": Family(QWEN35_MOE, MIXED, most=LINEAR, states=STATES),
}
