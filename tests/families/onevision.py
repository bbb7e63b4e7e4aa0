"""LLaVA-OneVision with images and with videos, and LLaVA-Video."""

from __future__ import annotations

from atexit import register
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np

from espalier.harness.specs.run_spec import VideoSpec
from tests.tiny import IMAGE, SHAPES, Family, tiny_spec

PINPOINTS = [[rows * IMAGE, columns * IMAGE] for rows in (1, 2, 3) for columns in (1, 2, 3)]
FRAMES = 3

_FOLDER = TemporaryDirectory()
register(_FOLDER.cleanup)


def architecture(side: int = 4, **model: Any) -> dict[str, Any]:
    """A tower of `side` patches along an edge, and planes of more than two tiles shrunk."""
    return {
        "vision": {"image_size": side * 7, "patch_size": 7, "vision_use_head": False},
        "model": {
            "image_grid_pinpoints": PINPOINTS,
            "vision_aspect_ratio": "anyres_max_2",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            **model,
        },
    }


def video(seed: int, frames: int = 6, width: int = 40, height: int = 32, rate: int = 4) -> str:
    """Write a small video of blocks that move; return its path."""
    path = Path(_FOLDER.name) / f"{seed}_{frames}_{width}_{height}_{rate}.mp4"
    if path.exists():
        return str(path)
    random = np.random.default_rng(seed)
    still = random.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture = np.roll(still, number, axis=1).repeat(8, 0).repeat(8, 1)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return str(path)


def watch(text: str, *media: Any) -> list[dict]:
    """One user turn with videos (paths) and pictures, then the text."""
    parts = [
        {"type": "video", "video": medium}
        if isinstance(medium, str)
        else {"type": "image", "image": medium}
        for medium in media
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


ONEVISION = tiny_spec(
    "llava_onevision",
    class_attention="mean",
    architecture=architecture(),
    video=VideoSpec(frames=FRAMES),
)
VIDEO = tiny_spec(
    "llava_video",
    class_attention="mean",
    architecture={
        **architecture(side=5),
        "model": {**architecture()["model"], "image_grid_pinpoints": [[35, 35]]},
    },
    video=VideoSpec(frames=FRAMES),
)

FAMILIES = {
    "onevision_image": Family(ONEVISION, tuple(SHAPES)),
    "onevision_video": Family(
        ONEVISION,
        (
            watch("w1 w2 w3", video(0)),
            watch("w4", video(1), video(2, frames=9)),
            watch("w5 w6 w7 w8 w9", video(3, width=24)),
        ),
    ),
    "onevision_mixed": Family(
        ONEVISION,
        (
            watch("w1 w2 w3", video(0), SHAPES[0][0]["content"][0]["image"]),
            SHAPES[1],
            watch("w5 w6 w7 w8 w9", video(3)),
        ),
    ),
    "llava_video": Family(
        VIDEO,
        (
            watch("w1 w2 w3", video(0)),
            watch("w4", video(1), video(2, frames=9)),
            watch("w5 w6 w7 w8 w9", video(3, width=24)),
        ),
    ),
}
