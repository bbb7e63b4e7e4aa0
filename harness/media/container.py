"""Open a video file and its video stream, with one-line errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path

import av
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from espalier.harness.errors import FOREIGN, UserError

#: Errors of opening a video.
BROKEN: tuple[type[Exception], ...] = (*FOREIGN, av.FFmpegError)


@contextmanager
def open_video(path: str | PathLike[str]) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video file and its first video stream that is not cover art.

    Raises:
        UserError: not an existing file, not a container, an image, no video stream, or an unknown codec.
    """
    name = fspath(path)
    # Not Path.is_file and Path.exists, which raise for names that are too long.
    if not os.path.isfile(name):
        state = "is not a file" if os.path.exists(name) else "does not exist"
        raise UserError(f"video {name!r} {state}; valid: a video file")
    try:
        # An absolute path cannot be mistaken for a protocol; titles that are not UTF-8 must not fail.
        container = av.open(str(Path(name).absolute()), metadata_errors="replace")
    except BROKEN as problem:
        raise UserError(f"video {name!r} cannot be opened: {reason(problem)}") from problem
    with container:
        yield container, _video_stream(container, name)


def _video_stream(container: InputContainer, name: str) -> VideoStream:
    """Return the first video stream that is not cover art."""
    format_name = container.format.name
    if format_name.endswith("_pipe") or format_name == "image2":
        raise UserError(
            f"video {name!r} is an image ({format_name.removesuffix('_pipe')}), not a video"
        )
    for stream in container.streams.video:
        if stream.disposition & Disposition.attached_pic:
            continue
        if stream.codec_context is None:
            raise UserError(f"video {name!r} has a codec that this build cannot decode")
        return stream
    raise UserError(f"video {name!r} has no video stream")


def reason(problem: Exception) -> str:
    """Return an error's message in one line, without the path that it repeats."""
    words = getattr(problem, "strerror", None) or str(problem)
    return " ".join(str(words).split())


def packets(container: InputContainer, stream: VideoStream) -> Iterator[Packet]:
    """Yield the stream's packets, without empty ones, which mark a missing frame or the end."""
    return (packet for packet in container.demux(stream) if packet.size)
