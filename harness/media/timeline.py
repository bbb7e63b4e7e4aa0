"""When the frames of a video are shown and where they lie in its file, known without decoding any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath

import av
import numpy as np
from av.packet import Packet
from av.video.stream import VideoStream

from espalier.harness.errors import UserError
from espalier.harness.media.container import open_video, reason

# A file whose packets end this long before the time that it states has lost its end. Headers round by less.
LOST_SECONDS = 1.0
LOST_SHARE = 0.05

# Containers round times to their clock's tick, and files made out of others keep the rounding: milliseconds, mostly.
ROUNDED_SECONDS = 1e-3

# A lone frame shows no rate, and what is stated may be the tick of a clock, 1,000 or more a second.
FASTEST = 240

# Containers that store no time of presentation; what the demuxer makes up can be wrong when frames are reordered.
UNTIMED = ("avi", "asf", "rm")


@dataclass(frozen=True, eq=False)
class Moments:
    """When the frames of a video are shown.

    Attributes:
        seconds: (T,) float64 time from the first frame to each.
        fps: average frames per second: that of the header where the times agree with it, else that of the times.
        steady: whether frames follow each other at that rate, but for the rounding of times in the file.
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
        """Seconds to the end of the last frame, which is given the average length."""
        return float(self.seconds[-1]) + 1 / self.fps


@dataclass(frozen=True, eq=False)
class Timeline:
    """The frames of a video in the order of presentation, as its packets announce them.

    Attributes:
        moments: when they are shown.
        pts: (T,) int64 the same in units of the stream's time base, as decoded frames carry it; strictly ascending.
        packet: (T,) position, among the stream's packets, of the packet that carries each frame.
        entry: (T,) position of the keyframe packet from which decoding must start to see that frame.
    """

    moments: Moments
    pts: np.ndarray
    packet: np.ndarray
    entry: np.ndarray


def moments(pts: Sequence[int | None], stream: VideoStream) -> Moments:
    """Return when frames are shown, from their presentation times in the stream's time base.

    Headers state rates that their frames do not keep: the highest one, that of the camera, or the tick of a clock. So
    they are believed where the times agree, to the rounding, which keeps the exact 30000/1001 of a file whose times are
    in milliseconds. Without usable times, frames are taken to follow at the stated rate. Needs at least one frame.
    """
    base = stream.time_base
    times = [at for at in pts if at is not None]
    timed = base is not None and len(times) == len(pts) and times == sorted(set(times))
    stated = float(stream.average_rate or stream.guessed_rate or 1)
    if len(pts) == 1 and stated > FASTEST:
        stated = 1.0  # keeps divisions by it defined
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
    """List a video's frames without decoding any.

    Counts in file headers are hints that are often absent or wrong, so they are not read. Cost: one pass over the file.

    Returns:
        The timeline, or None where packets do not say which frame is shown when: no times, repeated ones, made up ones,
        frames ahead of the first keyframe. Only decoding can tell then.

    Raises:
        UserError: the file is unreadable, has no frames, or ends before it should.
    """
    with open_video(path) as (container, stream):
        listing = _Listing()
        # Sound tracks only say how far the file reaches. One float a stream: a packet builds a Fraction each time.
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
                f"video {fspath(path)!r} is cut short: it ends within a frame, or covers {listing.seconds:.1f} s "
                f"of the {stated:.1f} s that it states; fetch it again, or remux it"
            )
        if not listing.pts:
            raise UserError(f"video {fspath(path)!r} has no frames")
        return None if container.format.name in UNTIMED else listing.timeline(stream)


class _Listing:
    """What one pass over the packets collects.

    Attributes:
        pts: time of each packet of the video stream.
        key: whether it is a keyframe.
        has_frame: whether its frame counts: packets that an edit list hides or that are damaged carry none to sample.
    """

    def __init__(self) -> None:
        self.pts: list[int | None] = []
        self.key: list[bool] = []
        self.has_frame: list[bool] = []
        self._first = float("inf")
        self._last = -float("inf")
        self._torn = False

    def add(self, packet: Packet, tick: float, of_video: bool) -> None:
        """Enter a packet of the video, or of a sound track; `tick` is its unit of time in seconds."""
        self._torn = packet.is_corrupt
        # Frames are decoded ahead of their time, at a variable rate by seconds.
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
        """Time between the first and the last packet of all."""
        return max(self._last - self._first, 0.0)

    def ends_early(self, stated: float) -> bool:
        """Return whether the last packet is torn, or the packets end long before the stated seconds do."""
        timed = self._last >= self._first
        # Matroska and ASF state where the clock ends, MP4 how long it runs; it need not begin at 0.
        lost = stated - max(self.seconds, self._last) if timed else 0.0
        return self._torn or lost > max(LOST_SECONDS, LOST_SHARE * stated)

    def timeline(self, stream: VideoStream) -> Timeline | None:
        """Order the frames by time; None if the packets do not suffice for that."""
        entry: list[int] = []
        before, newest = -1, -1
        for position, (pts, key) in enumerate(zip(self.pts, self.key, strict=True)):
            if key:
                before, newest = newest, position
            start = self.pts[newest] if newest >= 0 else None
            if pts is None or start is None:
                return None
            # A frame shown before the keyframe that precedes it in the file leans on the group of pictures before.
            entry.append(newest if pts >= start else before)
        packet = np.flatnonzero(self.has_frame)
        pts_shown = np.array(self.pts, dtype=np.int64)[packet]
        order = np.argsort(pts_shown, kind="stable")
        packet, pts_sorted = packet[order], pts_shown[order]
        entries = np.array(entry, dtype=np.int64)[packet]
        if not len(packet) or (np.diff(pts_sorted) == 0).any() or (entries < 0).any():
            return None
        return Timeline(moments(pts_sorted.tolist(), stream), pts_sorted, packet, entries)
