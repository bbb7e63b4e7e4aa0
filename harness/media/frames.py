"""Frames of a video file: exactly those that a rule names, without decoding the rest."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np

from espalier.harness.errors import UserError
from espalier.harness.media.frame_decoder import decode_groups, decode_through, decoded_moments
from espalier.harness.media.frame_rules import (
    FRAMES_KEY,
    SHORT_KEY,
    THINNED,
    check,
    each_second,
    pick,
    target_count,
    thinned,
)
from espalier.harness.media.timeline import Moments, read_timeline


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames of one video, as processors take them.

    Attributes:
        frames: (T, H, W, 3) uint8 RGB, upright.
        indices: the frames' numbers among all frames of the video, in order of presentation, ascending; those of a
            video with too few frames may repeat.
        timestamps: seconds from the video's first frame to each of them, as the file says, also at a variable rate.
        fps: average frames per second of the file, by the times of its frames where it has any.
        total_frames: frames in the file, counted.
        duration: seconds from the first frame to the end of the last, which is given the average length.
        steady: whether index / fps is the time of a frame, but for the rounding in the file.
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
        """The frames as processors take them for what they are: (T, H, W, 3), or (T, 3, H, W) of a height of 1 or 3.

        Such a height would be taken for the channels.
        """
        return self.frames.transpose(0, 3, 1, 2) if self.frames.shape[1] in (1, 3) else self.frames

    def metadata(self) -> dict[str, Any]:
        """Return what a processor reads as `video_metadata` beside `videos=clip.frames, do_sample_frames=False`.

        Processors derive times as index / fps. At a variable rate the indices are therefore the places, not whole
        numbers, that frames of these times would have at the average rate.
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
    """Take frames of a video by a stated rule.

    With T frames in the file and n = `n_frames`, the indices are, for the rule

    - `uniform`: floor(linspace(0, T - 1, n)), so the first and the last frame are among them, and n = 1 is the first.
      It is what the LLaVA-OneVision, LLaVA-Video and LongVA models of lmms-eval do.
    - `centre`: the centres of n equal segments, floor(s / 2 + round(s i)) with s = (T - 1) / n, or all frames if n = T.
      It is what the InternVL models of lmms-eval do.
    - `fps`: round(linspace(0, T - 1, m)), where m = T / fps * rate, but at least 4, at most n, at most T, and then
      lowered to an even number: one frame every 1 / rate seconds, and of a longer video n over its whole length.
      It is what evaluations of Qwen2-VL and Qwen2.5-VL do, at rate 2.

    - `pairs`: round(linspace(0, T - 1, m)) with m = min(n, T) lowered to an even number, whatever the length.
      It is what lmms-eval's chat class of Qwen2.5-VL does.
    - `floor`: floor(i T / n) for i < n. It is what the code of SpecVLM does.
    - `fps_then_uniform`: every round(fps / rate)-th frame; if these are more than n, as `uniform`. At rate 1 it is what
      lmms-eval's and VLMEvalKit's classes of LLaVA-Video do, and VLMEvalKit's of LLaVA-OneVision.
    - `fps_then_few`: what `fps` takes without a limit (4 to 768 frames); if these are more than n, floor(linspace)
      among them. At rate 2 it is what lmms-eval's simple classes of Qwen-VL do.

    The last two never want more frames than there are. Of the others, a video with fewer frames than wanted is looked
    at as `short` says:

    - `repeat`: the rule's own formula, which then names some frames several times, as those evaluations do.
    - `all`: every frame once.
    - `second`: every round(fps)-th frame, one a second, as the LLaVA-Video model of lmms-eval does.
    - `error`: it is refused.

    A frame is turned upright by the rotation in the file, as decord does, but not mirrored, and keeps its size in
    pixels. A stream whose packets do not tell their times is decoded from its start, twice: as exact, but slower. A
    file that lost its end is refused; MPEG streams, which state no length, cannot show that and count as long as they
    are.

    Args:
        path: a video file. Its first video stream is read, cover art aside.
        n_frames: n above.
        rule: a name in espalier.harness.media.frame_rules.NAMES.
        short: `repeat`, `all`, `second` or `error`.
        rate: frames per second of video, for the rules that go by the clock.

    Returns:
        The clip. Cost: the file is read twice, and decoded from the keyframe before each wanted frame up to that frame;
        n H W 3 bytes of memory.

    Raises:
        UserError: a bad argument; a file that is missing, not a video, damaged, cut short or without frames; a video
            with fewer frames than asked where `short` is `error`; one whose picture changes its size.
    """
    check(n_frames, rule, short, rate)
    timeline = read_timeline(path)
    if timeline is not None:
        indices = _choose(path, timeline.moments, n_frames, rule, short, rate)
        once, places = np.unique(indices, return_inverse=True)
        frames = decode_groups(path, timeline, once.tolist())
        if frames is not None:
            return _clip(_in_places(frames, places), indices, timeline.moments)
    # The packets told too little, or not the truth: what decoding gives is what there is.
    times = decoded_moments(path)
    indices = _choose(path, times, n_frames, rule, short, rate)
    once, places = np.unique(indices, return_inverse=True)
    return _clip(_in_places(decode_through(path, once.tolist()), places), indices, times)


def _in_places(frames: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return frames (n, H, W, 3) repeated to stand in `places`; without a copy where each stands once."""
    return frames if len(frames) == len(places) else frames[places]


def _choose(
    path: str | PathLike[str], times: Moments, count: int, rule: str, short: str, rate: float
) -> tuple[int, ...]:
    """Return the indices to take of a video, or refuse it as too short."""
    if rule in THINNED:
        return thinned(times.total, count, rule, rate, times.fps)
    target = target_count(times.total, count, rule, rate, times.fps)
    if target <= times.total or short == "repeat":
        return pick(times.total, target, rule)
    if short == "all":
        return tuple(range(times.total))
    if short == "second":
        return each_second(times.total, times.fps)
    raise UserError(
        f"{FRAMES_KEY}={count}: video {fspath(path)!r} has {times.total} frames where {target} are wanted; "
        f"valid: a video of more frames, fewer frames asked, or {SHORT_KEY}=repeat"
    )


def _clip(frames: np.ndarray, indices: tuple[int, ...], times: Moments) -> Clip:
    """Put a clip together."""
    return Clip(
        frames=frames,
        indices=indices,
        timestamps=tuple(float(times.seconds[i]) for i in indices),
        fps=times.fps,
        total_frames=times.total,
        duration=times.duration,
        steady=times.steady,
    )
