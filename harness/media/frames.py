"""Sample frames of a video file by a rule, decoding only what they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from os import PathLike, fspath
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import PictureType, VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.media.frame_rules import (
    FRAMES_KEY,
    SHORT_KEY,
    THINNED,
    check_rule,
    each_second,
    rule_indices,
    target_count,
    thinned_indices,
)
from espalier.harness.media.timeline import (
    Moments,
    Timeline,
    moments,
    open_video,
    packets,
    read_timeline,
)


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
            # Decoders with only independent frames may leave the type unset.
            depends = not frame.key_frame and frame.pict_type != PictureType.NONE
            if pts in first and depends:
                return False
            earlier = pts
            missing.discard(pts)
            if pts in group.places:
                array.store(group.places[pts], frame)
    except av.FFmpegError:
        return False
    return not missing


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


@dataclass(frozen=True, eq=False)
class Clip:
    """Sampled frames of one video, for processors.

    Attributes:
        frames: (T, H, W, 3) uint8 RGB, upright.
        indices: indices of the frames in the video, in presentation order, ascending; indices may repeat if the video
            has too few frames.
        timestamps: seconds from the video's first frame to each of them, from the file, also at a variable rate.
        fps: average frames per second of the file, by the times of its frames if it has any.
        total_frames: number of frames in the file, counted.
        duration: seconds from the first frame to the end of the last, which gets the average length.
        steady: whether index / fps is the time of a frame, up to the rounding in the file.
    """

    frames: np.ndarray
    indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    fps: float
    total_frames: int
    duration: float
    steady: bool = True

    @property
    def pixels(self) -> np.ndarray:
        """The frames as (T, H, W, 3), or as (T, 3, H, W) for a height of 1 or 3, which processors take for channels."""
        return self.frames.transpose(0, 3, 1, 2) if self.frames.shape[1] in (1, 3) else self.frames

    def resized(self, width: int, height: int) -> np.ndarray:
        """Return the frames as (T, height, width, 3), by Pillow's bicubic filter.

        Releases resize so; torchvision's values differ by up to 10 of 255 levels at hard edges.
        """
        bicubic = Image.Resampling.BICUBIC
        pictures = [
            Image.fromarray(frame).resize((width, height), bicubic) for frame in self.frames
        ]
        return np.stack([np.asarray(picture) for picture in pictures])

    def metadata(self) -> dict[str, Any]:
        """Return a processor's `video_metadata` for `videos=clip.frames, do_sample_frames=False`.

        Processors compute times as index / fps. At a variable rate the indices are therefore fractional: time * fps.
        """
        indices = self.indices if self.steady else [at * self.fps for at in self.timestamps]
        return {
            "total_num_frames": self.total_frames,
            "fps": self.fps,
            "height": self.frames.shape[1],
            "width": self.frames.shape[2],
            "duration": self.duration,
            "video_backend": "pyav",
            "frames_indices": list(indices),
        }


def sample_frames(
    path: str | PathLike[str],
    n_frames: int,
    rule: str = "uniform",
    short: str = "repeat",
    rate: float = 2.0,
) -> Clip:
    """Sample frames of a video by a rule.

    With T frames in the file and n = `n_frames`, the indices of the rules are

    - `uniform`: floor(linspace(0, T - 1, n)), including the first and last frame; n = 1 is the first frame.
      As in lmms-eval's LLaVA-OneVision, LLaVA-Video and LongVA models.
    - `centre`: the centres of n equal segments, floor(s / 2 + round(s i)) with s = (T - 1) / n, or all frames if n = T.
      As in lmms-eval's InternVL models.
    - `fps`: round(linspace(0, T - 1, m)) with m = T / fps * rate, but at least 4, at most n and T, then rounded down
      to an even number: one frame every 1 / rate seconds, or n frames over the whole length of longer videos.
      As in evaluations of Qwen2-VL and Qwen2.5-VL, at rate 2.
    - `pairs`: round(linspace(0, T - 1, m)) with m = min(n, T) rounded down to an even number.
      As in lmms-eval's chat class of Qwen2.5-VL.
    - `floor`: floor(i T / n) for i < n. As in the code of SpecVLM.
    - `fps_then_uniform`: every round(fps / rate)-th frame; if these are more than n, as `uniform`. At rate 1 as in
      lmms-eval's and VLMEvalKit's classes of LLaVA-Video, and VLMEvalKit's of LLaVA-OneVision.
    - `fps_then_few`: the frames of `fps` without a limit (4 to 768 frames); if these are more than n, floor(linspace)
      among them. At rate 2 as in lmms-eval's simple classes of Qwen-VL.

    The last two never take more frames than the video has. For the others, `short` selects the handling of videos with
    too few frames:

    - `repeat`: the rule's formula, which repeats frames, as in those evaluations.
    - `all`: every frame once.
    - `second`: every round(fps)-th frame, one per second, as in lmms-eval's LLaVA-Video model.
    - `error`: the video is refused.

    Frames are rotated upright by the rotation in the file, as in decord, but not mirrored, and not resized. A stream
    without packet times is decoded from its start, twice: exact, but slower. Truncated files are refused, except MPEG
    streams, which state no length.

    Args:
        path: a video file; its first video stream that is not cover art is read.
        n_frames: n above.
        rule: a name in espalier.harness.media.frame_rules.NAMES.
        short: `repeat`, `all`, `second` or `error`.
        rate: sampled frames per second, for the rules by time.

    Returns:
        The clip. Cost: reads the file twice, and decodes from the keyframe before each selected frame to that frame;
        n H W 3 bytes of memory.

    Raises:
        UserError: an invalid argument; a file that is missing, not a video, damaged, truncated or without frames; a
            video with too few frames if `short` is `error`; a video with changing picture size.
    """
    check_rule(n_frames, rule, short, rate)
    timeline = read_timeline(path)
    if timeline is not None:
        indices = _choose(path, timeline.moments, n_frames, rule, short, rate)
        once, places = np.unique(indices, return_inverse=True)
        frames = decode_groups(path, timeline, once.tolist())
        if frames is not None:
            return _clip(_in_places(frames, places), indices, timeline.moments)
    # Packet times are missing or wrong: use the frames that decoding yields.
    times = decoded_moments(path)
    indices = _choose(path, times, n_frames, rule, short, rate)
    once, places = np.unique(indices, return_inverse=True)
    return _clip(_in_places(decode_through(path, once.tolist()), places), indices, times)


def _in_places(frames: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return frames (n, H, W, 3) repeated by `places`; without a copy if each occurs once."""
    return frames if len(frames) == len(places) else frames[places]


def _choose(
    path: str | PathLike[str], times: Moments, count: int, rule: str, short: str, rate: float
) -> tuple[int, ...]:
    """Return the indices of the frames to take; raise UserError if the video is too short."""
    if rule in THINNED:
        return thinned_indices(times.total, count, rule, rate, times.fps)
    target = target_count(times.total, count, rule, rate, times.fps)
    if target <= times.total or short == "repeat":
        return rule_indices(times.total, target, rule)
    if short == "all":
        return tuple(range(times.total))
    if short == "second":
        return each_second(times.total, times.fps)
    raise UserError(
        f"{FRAMES_KEY}={count}: video {fspath(path)!r} has {times.total} frames, fewer than {target}; "
        f"valid: a longer video, a smaller {FRAMES_KEY}, or {SHORT_KEY}=repeat"
    )


def _clip(frames: np.ndarray, indices: tuple[int, ...], times: Moments) -> Clip:
    """Return the clip of sampled frames."""
    return Clip(
        frames=frames,
        indices=indices,
        timestamps=tuple(float(times.seconds[i]) for i in indices),
        fps=times.fps,
        total_frames=times.total,
        duration=times.duration,
        steady=times.steady,
    )
