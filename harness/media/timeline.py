"""Times of a video's frames and their positions in the file, without decoding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import av
import numpy as np
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


# A file is truncated if its packets end this long before its stated duration. Headers round by less.
LOST_SECONDS = 1.0
LOST_SHARE = 0.05

# Containers round times to the tick of their clock, and remuxed files keep the rounding, usually milliseconds.
ROUNDED_SECONDS = 1e-3

# A single frame has no rate, and the stated rate may be the tick of a clock, 1,000 or more per second.
FASTEST = 240

# Containers without presentation times; those that the demuxer derives can be wrong for reordered frames.
UNTIMED = ("avi", "asf", "rm")


@dataclass(frozen=True, eq=False)
class Moments:
    """The presentation times of a video's frames.

    Attributes:
        seconds: (T,) float64 time from the first frame to each frame.
        fps: average frames per second: that of the header if the times agree with it, else that of the times.
        steady: whether frames have that constant rate, up to the rounding of times in the file.
    """

    seconds: np.ndarray
    fps: float
    steady: bool = True

    @property
    def total(self) -> int:
        """Frames in the video."""
        return len(self.seconds)

    @property
    def duration(self) -> float:
        """Seconds to the end of the last frame, which gets the average length."""
        return float(self.seconds[-1]) + 1 / self.fps


@dataclass(frozen=True, eq=False)
class Timeline:
    """The frames of a video in presentation order, as listed by its packets.

    Attributes:
        moments: presentation times.
        pts: (T,) int64 presentation times in units of the stream's time base, as in decoded frames; strictly ascending.
        packet: (T,) position of each frame's packet among the stream's packets.
        entry: (T,) position of the keyframe packet where decoding of each frame must start.
    """

    moments: Moments
    pts: np.ndarray
    packet: np.ndarray
    entry: np.ndarray


def moments(pts: Sequence[int | None], stream: VideoStream) -> Moments:
    """Return the times of frames, at least one, from their presentation times in the stream's time base.

    Headers may state a rate that frames do not have: the highest rate, that of the camera, or the tick of a clock. The
    stated rate is used if the times agree with it up to rounding, which keeps the exact 30000/1001 of a file with times
    in milliseconds. Without usable times, frames get the stated rate.
    """
    base = stream.time_base
    times = [at for at in pts if at is not None]
    timed = base is not None and len(times) == len(pts) and times == sorted(set(times))
    stated = float(stream.average_rate or stream.guessed_rate or 1)
    if len(pts) == 1 and stated > FASTEST:
        stated = 1.0  # unknown; nonzero for divisions
    if not timed or len(times) < 2:
        return Moments(np.arange(len(pts)) / stated, stated)
    tick = float(base or 0)
    seconds = np.array([at - times[0] for at in times], dtype=np.float64) * tick
    rounding = max(tick, ROUNDED_SECONDS) * 1.01
    for fps in (stated, (len(times) - 1) / float(seconds[-1])):
        if np.abs(seconds - np.arange(len(times)) / fps).max() <= rounding:
            return Moments(seconds, fps)
    return Moments(seconds, fps, steady=False)


def read_timeline(path: str | PathLike[str]) -> Timeline | None:
    """Return the timeline of a video without decoding. Cost: one pass over the file.

    Counts in file headers are often absent or wrong, so they are not read.

    Returns:
        The timeline, or None if packets do not give the times of frames: missing, repeated or derived times, or frames
        before the first keyframe. The video must then be decoded.

    Raises:
        UserError: the file is unreadable, has no frames, or is truncated.
    """
    with open_video(path) as (container, stream):
        listing = _Listing()
        # Audio tracks only show the length of the file. A float per stream: a packet builds a Fraction each time.
        tick = {s.index: float(s.time_base or 0) for s in (stream, *container.streams.audio)}
        try:
            for packet in container.demux([stream, *container.streams.audio]):
                if packet.size:  # PyAV ends each stream with an empty packet
                    listing.add(
                        packet, tick[packet.stream_index], packet.stream_index == stream.index
                    )
        except av.FFmpegError as problem:
            raise UserError(f"video {fspath(path)!r} is damaged: {reason(problem)}") from problem
        stated = (container.duration or 0) / av.time_base
        if listing.ends_early(stated):
            raise UserError(
                f"video {fspath(path)!r} is truncated: it ends within a frame, or covers {listing.seconds:.1f} s "
                f"of its stated {stated:.1f} s; fetch it again, or remux it"
            )
        if not listing.pts:
            raise UserError(f"video {fspath(path)!r} has no frames")
        return None if container.format.name in UNTIMED else listing.timeline(stream)


class _Listing:
    """Data collected in one pass over the packets.

    Attributes:
        pts: time of each packet of the video stream.
        key: whether it is a keyframe.
        has_frame: whether its frame counts; False for packets that an edit list hides or that are damaged.
    """

    def __init__(self) -> None:
        self.pts: list[int | None] = []
        self.key: list[bool] = []
        self.has_frame: list[bool] = []
        self._first = float("inf")
        self._last = -float("inf")
        self._torn = False

    def add(self, packet: Packet, tick: float, of_video: bool) -> None:
        """Add a packet of the video or an audio track; `tick` is its time unit in seconds."""
        self._torn = packet.is_corrupt
        # Decoding times precede presentation times, at a variable rate by seconds.
        for at in (packet.dts, packet.pts):
            if at is not None:
                self._first = min(self._first, at * tick)
                self._last = max(self._last, (at + (packet.duration or 0)) * tick)
        if of_video:
            self.pts.append(packet.pts)
            self.key.append(packet.is_keyframe)
            self.has_frame.append(not (packet.is_discard or packet.is_corrupt))

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last packet of all streams."""
        return max(self._last - self._first, 0.0)

    def ends_early(self, stated: float) -> bool:
        """Return whether the last packet is incomplete, or the packets end long before the stated duration."""
        timed = self._last >= self._first
        # Matroska and ASF state the end of the clock, MP4 its duration; the clock may not start at 0.
        lost = stated - max(self.seconds, self._last) if timed else 0.0
        return self._torn or lost > max(LOST_SECONDS, LOST_SHARE * stated)

    def timeline(self, stream: VideoStream) -> Timeline | None:
        """Return the frames ordered by time; None if packets lack the information."""
        entry: list[int] = []
        before, newest = -1, -1
        for position, (pts, key) in enumerate(zip(self.pts, self.key, strict=True)):
            if key:
                before, newest = newest, position
            start = self.pts[newest] if newest >= 0 else None
            if pts is None or start is None:
                return None
            # A frame presented before the preceding keyframe depends on the previous group of pictures.
            entry.append(newest if pts >= start else before)
        packet = np.flatnonzero(self.has_frame)
        pts_shown = np.array(self.pts, dtype=np.int64)[packet]
        order = np.argsort(pts_shown, kind="stable")
        packet, pts_sorted = packet[order], pts_shown[order]
        entries = np.array(entry, dtype=np.int64)[packet]
        if not len(packet) or (np.diff(pts_sorted) == 0).any() or (entries < 0).any():
            return None
        return Timeline(moments(pts_sorted.tolist(), stream), pts_sorted, packet, entries)


#: File suffixes of the videos in these data sets.
ENDINGS = (".mp4", ".MP4", ".mkv")


def unpacked(folder: str, video: str) -> str:
    """Return the path of a video below HF_HOME, with any of the suffixes.

    Raises:
        UserError: the path is a folder of frames, of unknown order and rate.
        FileNotFoundError: the video is missing.
    """
    path = Path(os.getenv("HF_HOME", "~/.cache/huggingface")).expanduser() / folder / video
    # A name may contain dots, so suffixes are added, not replaced.
    candidates = (path, *(path.with_name(path.name + end) for end in ENDINGS))
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None and path.is_dir():
        raise UserError(
            f"video {str(path)!r} is a folder of frames; valid: a video file, as in the revision of the data set that "
            "the task file names"
        )
    if file is None:
        raise FileNotFoundError(
            f"video {str(path)!r} does not exist; valid: the videos that lmms-eval unpacks"
        )
    return str(file)
