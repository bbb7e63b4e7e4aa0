"""Decode selected frames of a video: by groups of pictures, or from the start if packets are unreliable."""

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
    """The (n, H, W, 3) array of selected frames, filled during decoding to avoid a second copy."""

    def __init__(self, path: str | PathLike[str], count: int) -> None:
        self._path = path
        self._count = count
        self.frames = np.empty((0, 0, 0, 3), dtype=np.uint8)

    def store(self, place: int, frame: VideoFrame) -> None:
        """Store an upright frame at an index."""
        picture = frame.to_ndarray(format="rgb24")
        # The display matrix gives a counter-clockwise rotation, as does rot90.
        picture = np.rot90(picture, round(frame.rotation / 90) % 4)
        if not self.frames.size:
            self.frames = np.empty((self._count, *picture.shape), dtype=np.uint8)
        if picture.shape != self.frames.shape[1:]:
            height, width = self.frames.shape[1:3]
            raise UserError(
                f"video {fspath(self._path)!r} changes its picture size from {width}x{height} to "
                f"{picture.shape[1]}x{picture.shape[0]}; valid: one size"
            )
        self.frames[place] = picture


@dataclass
class _Group:
    """A range of packets to decode together.

    Attributes:
        start: position of the keyframe packet where decoding starts.
        end: position of the last packet needed by a selected frame.
        places: index in the result by presentation time, for the selected frames.
    """

    start: int
    end: int
    places: dict[int, int]


def decode_groups(
    path: str | PathLike[str], timeline: Timeline, indices: Sequence[int]
) -> np.ndarray | None:
    """Decode selected frames, and other frames only as far as these depend on them.

    Packets between groups are read but not decoded. A seek would also save reading them, but its target depends on the
    container's index, and the file has just been read for its timeline.

    Args:
        path: a video file.
        timeline: timeline of the file.
        indices: indices of the frames, ascending, distinct, at least one.

    Returns:
        (n, H, W, 3) uint8, or None if a packet does not yield the frame of the timeline: separately coded fields,
        damaged packets, false keyframes.

    Raises:
        UserError: the picture size changes.
    """
    groups = _groups(timeline, indices)
    array = _FrameArray(path, len(indices))
    with open_video(path) as (container, stream):
        stream.thread_type = "AUTO"  # frames in parallel: twice as fast on two cores at 1280x720
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
    """Decode one group from the iterator of packets; return False if frames differ from the timeline."""
    in_group = (timeline.packet >= group.start) & (timeline.packet <= group.end)
    # Excluded: frames that depend on the group before the keyframe, which may fail here.
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
    """Return whether a frame is independent; decoders with only independent frames may leave the type unset."""
    return frame.key_frame or frame.pict_type == PictureType.NONE


def _through(
    stream: VideoStream, numbered: Iterator[tuple[int, Packet]], group: _Group
) -> Iterator[VideoFrame]:
    """Yield the frames of a group, including those that the decoder holds until it is flushed."""
    for position, packet in numbered:
        if position >= group.start:
            yield from stream.decode(packet)
        if position == group.end:
            break
    yield from stream.decode(None)


def _groups(timeline: Timeline, indices: Sequence[int]) -> list[_Group]:
    """Merge selected frames into groups; a new group starts if a keyframe follows all packets needed so far."""
    groups: list[_Group] = []
    for place, index in enumerate(indices):
        entry, packet = int(timeline.entry[index]), int(timeline.packet[index])
        if not groups or entry > groups[-1].end:
            groups.append(_Group(entry, packet, {}))
        groups[-1].end = max(groups[-1].end, packet)
        groups[-1].places[int(timeline.pts[index])] = place
    return groups


def decoded_moments(path: str | PathLike[str]) -> Moments:
    """Return the times of all frames that decoding yields. Cost: decodes the whole file.

    Raises:
        UserError: decoding yields no frame.
    """
    with open_video(path) as (container, stream):
        pts = [frame.pts for frame in _decodable(container, stream)]
        if not pts:
            raise UserError(f"video {fspath(path)!r} has no frames that can be decoded")
        return moments(pts, stream)


def decode_through(path: str | PathLike[str], indices: Sequence[int]) -> np.ndarray:
    """Decode from the start and return selected frames, counted as in `decoded_moments`.

    Args:
        path: a video file.
        indices: indices of the frames, ascending, distinct.

    Returns:
        (n, H, W, 3) uint8.

    Raises:
        UserError: the picture size changes.
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
    """Yield the frames in presentation order, skipping packets that cannot be decoded."""
    for packet in chain(packets(container, stream), (None,)):  # None flushes the decoder
        if packet is not None and packet.is_corrupt:
            continue
        try:
            yield from stream.decode(packet)
        except av.FFmpegError:
            continue
