"""Decoding wanted frames of a video, group of pictures by group, or all of it where packets cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from os import PathLike, fspath

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import PictureType, VideoFrame
from av.video.stream import VideoStream

from espalier.harness.errors import UserError
from espalier.harness.media.container import open_video, packets
from espalier.harness.media.timeline import Moments, Timeline, moments


class _FrameArray:
    """The (n, H, W, 3) array of wanted frames, filled as they come, so that it exists once only."""

    def __init__(self, path: str | PathLike[str], count: int) -> None:
        self._path = path
        self._count = count
        self.frames = np.empty((0, 0, 0, 3), dtype=np.uint8)

    def store(self, place: int, frame: VideoFrame) -> None:
        """Store a frame, upright."""
        picture = frame.to_ndarray(format="rgb24")
        # The display matrix says how far to turn against the clock, as rot90 does.
        picture = np.rot90(picture, round(frame.rotation / 90) % 4)
        if not self.frames.size:
            self.frames = np.empty((self._count, *picture.shape), dtype=np.uint8)
        if picture.shape != self.frames.shape[1:]:
            height, width = self.frames.shape[1:3]
            raise UserError(
                f"video {fspath(self._path)!r} changes its picture from {width}x{height} to "
                f"{picture.shape[1]}x{picture.shape[0]}; valid: one size"
            )
        self.frames[place] = picture


@dataclass
class _Group:
    """Packets to decode in one go.

    Attributes:
        start: position of the keyframe packet where decoding starts.
        end: position of the last packet that a wanted frame needs.
        places: presentation time to place in the answer, for the wanted frames.
    """

    start: int
    end: int
    places: dict[int, int]


def decode_groups(
    path: str | PathLike[str], timeline: Timeline, indices: Sequence[int]
) -> np.ndarray | None:
    """Decode the frames with these indices, and of the others only those that they need.

    Packets between groups are read and thrown away, not decoded. A seek would save reading them as well, but it lands
    where each container's index pleases, and the file has just been read for its timeline.

    Args:
        path: a video file.
        timeline: its timeline.
        indices: frames to return, ascending, all different, at least one.

    Returns:
        (n, H, W, 3) uint8, or None if some packet did not give the frame that the timeline promises: fields coded
        apart, damaged packets, keyframes in name only.

    Raises:
        UserError: the size of the picture changes.
    """
    groups = _groups(timeline, indices)
    array = _FrameArray(path, len(indices))
    with open_video(path) as (container, stream):
        stream.thread_type = "AUTO"  # frames side by side: twice as fast on two cores at 1280x720
        numbered = enumerate(packets(container, stream))
        for group in groups:
            if not _decode_group(stream, numbered, group, timeline, array):
                return None
            stream.codec_context.flush_buffers()
    return array.frames


def _decode_group(
    stream: VideoStream,
    numbered: Iterator[tuple[int, Packet]],
    group: _Group,
    timeline: Timeline,
    array: _FrameArray,
) -> bool:
    """Decode one group from the running packets; False if it did not give the frames that the timeline promises."""
    in_group = (timeline.packet >= group.start) & (timeline.packet <= group.end)
    # Frames that lean on the group before the keyframe may fail here, and are not asked of this group.
    missing = set(timeline.pts[in_group & (timeline.entry >= group.start)].tolist())
    first = set(timeline.pts[timeline.packet == group.start].tolist())
    earlier: int | None = None
    try:
        for frame in _through(stream, numbered, group):
            pts: int | None = frame.pts
            if pts is None or (earlier is not None and pts <= earlier):
                return False
            if pts in first and not _stands_alone(frame):
                return False
            earlier = pts
            missing.discard(pts)
            if pts in group.places:
                array.store(group.places[pts], frame)
    except av.FFmpegError:
        return False
    return not missing


def _stands_alone(frame: VideoFrame) -> bool:
    """Return whether a frame needs no other; decoders whose frames never do may leave the kind open."""
    return frame.key_frame or frame.pict_type == PictureType.NONE


def _through(
    stream: VideoStream, numbered: Iterator[tuple[int, Packet]], group: _Group
) -> Iterator[VideoFrame]:
    """Yield the frames of a group, with those that the decoder holds back until told that no more will come."""
    for position, packet in numbered:
        if position >= group.start:
            yield from stream.decode(packet)
        if position == group.end:
            break
    yield from stream.decode(None)


def _groups(timeline: Timeline, indices: Sequence[int]) -> list[_Group]:
    """Join wanted frames into groups; a new one begins where a keyframe lies ahead of all that was needed so far."""
    groups: list[_Group] = []
    for place, index in enumerate(indices):
        entry, packet = int(timeline.entry[index]), int(timeline.packet[index])
        if not groups or entry > groups[-1].end:
            groups.append(_Group(entry, packet, {}))
        groups[-1].end = max(groups[-1].end, packet)
        groups[-1].places[int(timeline.pts[index])] = place
    return groups


def decoded_moments(path: str | PathLike[str]) -> Moments:
    """Return when the frames are shown that decoding really gives. Cost: decodes the whole file.

    Raises:
        UserError: decoding gives no frame.
    """
    with open_video(path) as (container, stream):
        pts = [frame.pts for frame in _decodable(container, stream)]
        if not pts:
            raise UserError(f"video {fspath(path)!r} has no frames that can be decoded")
        return moments(pts, stream)


def decode_through(path: str | PathLike[str], indices: Sequence[int]) -> np.ndarray:
    """Decode from the start and keep the frames with these indices, out of those that `decoded_moments` counts.

    Args:
        path: a video file.
        indices: frames to return, ascending, all different.

    Returns:
        (n, H, W, 3) uint8.

    Raises:
        UserError: the size of the picture changes.
    """
    places = {index: place for place, index in enumerate(indices)}
    array = _FrameArray(path, len(indices))
    with open_video(path) as (container, stream):
        for index, frame in enumerate(_decodable(container, stream)):
            if index in places:
                array.store(places[index], frame)
            if index == indices[-1]:
                break
    return array.frames


def _decodable(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Yield the frames in order of presentation, past packets that cannot be decoded."""
    for packet in chain(packets(container, stream), (None,)):  # None: give what is held back
        if packet is not None and packet.is_corrupt:
            continue
        try:
            yield from stream.decode(packet)
        except av.FFmpegError:
            continue
