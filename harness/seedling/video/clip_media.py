"""Clips as video input: frames in memory, or an mp4 file."""

from __future__ import annotations

from fractions import Fraction
from os import replace
from pathlib import Path

import av
from av.video.stream import VideoStream

from espalier.harness.errors import UserError
from espalier.harness.media import frames
from espalier.harness.seedling.video.clips import DrawnClip

RATE = 1
"""Frames per second: the time word of a frame is its second."""


def in_memory(clip: DrawnClip) -> frames.Clip:
    """Return the frames as a sampled video, without a file."""
    length = len(clip.frames)
    return frames.Clip(
        frames=clip.frames,
        indices=tuple(range(length)),
        timestamps=tuple(frame / RATE for frame in range(length)),
        fps=float(RATE),
        total_frames=length,
        duration=length / RATE,
    )


def write_mp4(clip: DrawnClip, folder: str | Path) -> Path:
    """Write a clip as an mp4 file and return its path.

    Lossless H.264 in RGB (libx264rgb at a quantiser of 0), so that reading gives the same pixels. The
    file is replaced atomically.

    Args:
        clip: The clip.
        folder: Folder of the file; created if missing.

    Raises:
        UserError: This build of FFmpeg lacks the codec.
    """
    if "libx264rgb" not in av.codecs_available:
        raise UserError(
            "clips cannot be written as mp4 files: this build of PyAV lacks libx264rgb; valid: frames in memory"
        )
    path = Path(folder) / f"{clip.split}_{clip.seed}_{clip.index}_{len(clip.frames)}.mp4"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    height, width = clip.frames.shape[1:3]
    with av.open(str(part), "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=Fraction(RATE))
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "rgb24"
        stream.options = {"qp": "0", "preset": "ultrafast", "threads": "1"}
        for pixels in clip.frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    replace(part, path)
    return path
