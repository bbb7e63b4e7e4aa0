"""Sample frames of a video file by a rule, decoding only what they need."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.media.frame_decoder import decode_groups, decode_through, decoded_moments
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
from espalier.harness.media.timeline import Moments, read_timeline


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
