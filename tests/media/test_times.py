"""Rates and times of videos follow the frames, not the container's header."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3VLProcessor

from espalier.harness.media.frames import Clip, sample_frames
from espalier.harness.models.llava_video import time_instruction
from tests.media.test_media import encode as write

#: Ten frames in the first second, then ten a second apart.
SLOWING = [100 * i for i in range(10)] + [1000 * i for i in range(1, 11)]

#: Codec and pixels of each, and the format where the ending does not say it.
CONTAINERS = {
    "mp4": {},
    "mkv": {},
    "webm": {"codec": "libvpx-vp9"},
    "avi": {"codec": "mpeg4"},
    "gif": {"codec": "gif", "pixels": "rgb8"},
    "ts": {"container": "mpegts"},
}


def shade(number: int) -> np.ndarray:
    return np.full((48, 64, 3), 9 * number % 250, np.uint8)


def encode(path: Path, milliseconds: list[int], rate: int | Fraction = 10) -> Path:
    """Write frames that are shown at the given times, under a header that states `rate`."""
    count, way = len(milliseconds), CONTAINERS[path.suffix[1:]]
    return write(path, count, milliseconds=milliseconds, draw=shade, rate=rate, **way)


@pytest.mark.parametrize("ending", CONTAINERS)
def test_a_variable_rate_is_that_of_the_times_in_every_container(
    ending: str, tmp_path: Path
) -> None:
    path = encode(tmp_path / f"slowing.{ending}", SLOWING)
    clip = sample_frames(path, 64, short="all")
    assert clip.timestamps == pytest.approx([at / 1000 for at in SLOWING], abs=0.011)
    assert clip.fps == pytest.approx(1.9, rel=0.01)
    assert clip.duration == pytest.approx(20 / 1.9, rel=0.01)
    # Ten seconds at one frame a second are ten frames; eight of these fit.
    for most, rule, count in (
        (8, "fps", 8),
        (8, "fps_then_uniform", 8),
        (64, "fps_then_uniform", 10),
    ):
        assert len(sample_frames(path, most, rule, rate=1.0).indices) == count


@pytest.mark.parametrize("ending", CONTAINERS)
def test_models_are_told_the_times_of_the_frames(ending: str, tmp_path: Path) -> None:
    clip = sample_frames(encode(tmp_path / f"slowing.{ending}", SLOWING), 4)
    at = [SLOWING[index] / 1000 for index in clip.indices]
    metadata = clip.metadata()
    places, fps = metadata["frames_indices"], metadata["fps"]
    pairs = Qwen3VLProcessor._calculate_timestamps(None, list(places), fps)
    assert pairs == pytest.approx([(at[0] + at[1]) / 2, (at[2] + at[3]) / 2], abs=0.011)
    # What Qwen2.5-VL's processor makes the seconds of a pair of frames of.
    sampled = len(places) / metadata["total_num_frames"] * fps
    assert 2 / sampled == pytest.approx(clip.duration / 2)
    sentence = time_instruction(clip)
    assert sentence.startswith("The video lasts for 10.5")
    assert ",".join(f"{second:.2f}s" for second in clip.timestamps) in sentence


@pytest.mark.parametrize(("rate", "total"), [(29.97, 360), (23.976, 288), (59.94, 720)])
def test_frames_of_every_second_are_told_in_whole_seconds(rate: float, total: int) -> None:
    """As the release: it divides by the rounded rate, which shows from the fifth second on."""
    steps = range(0, total, round(rate))
    clip = Clip(
        *(np.zeros((len(steps), 2, 2, 3), np.uint8), tuple(steps), tuple(i / rate for i in steps)),
        *(rate, total, total / rate),
    )
    sentence = time_instruction(clip)
    assert f"located at {','.join(f'{second}.00s' for second in range(12))}." in sentence
    uneven = replace(clip, indices=(0, 100, total - 1))
    assert f"0.00s,{100 / rate:.2f}s,{(total - 1) / rate:.2f}s." in time_instruction(uneven)


@pytest.mark.parametrize("ending", CONTAINERS)
def test_a_constant_rate_keeps_the_exact_rate_of_its_header(ending: str, tmp_path: Path) -> None:
    path = encode(tmp_path / f"steady.{ending}", [round(1000 * i / 8) for i in range(24)], rate=8)
    clip = sample_frames(path, 6)
    assert clip.fps == pytest.approx(8.0, rel=1e-6 if ending in ("mp4", "mkv", "webm") else 0.02)
    if ending in ("mp4", "mkv", "webm"):
        assert (clip.fps, clip.metadata()["frames_indices"]) == (8.0, list(clip.indices))


def test_times_in_milliseconds_do_not_move_an_exact_rate(tmp_path: Path) -> None:
    times = [round(1001 * i / 30) for i in range(90)]
    clip = sample_frames(encode(tmp_path / "exact.mkv", times, Fraction(30000, 1001)), 8)
    assert (clip.fps, clip.metadata()["frames_indices"]) == (30000 / 1001, list(clip.indices))


@pytest.mark.parametrize("ending", ["mp4", "mkv", "webm", "gif", "ts"])
def test_a_clip_that_does_not_start_at_zero_is_whole(ending: str, tmp_path: Path) -> None:
    path = encode(tmp_path / f"late.{ending}", [5000 + at for at in SLOWING])
    clip = sample_frames(path, 64, short="all")
    assert clip.timestamps == pytest.approx([at / 1000 for at in SLOWING], abs=0.011)
    assert clip.fps == pytest.approx(1.9, rel=0.01)


@pytest.mark.parametrize("ending", CONTAINERS)
def test_a_lone_frame_has_no_rate_of_a_clock(ending: str, tmp_path: Path) -> None:
    clip = sample_frames(encode(tmp_path / f"lone.{ending}", [0]), 8)
    assert clip.fps in (1.0, 10.0)
    assert clip.timestamps == (0.0,) * 8


@pytest.mark.parametrize("ending", CONTAINERS)
def test_two_frames_five_seconds_apart(ending: str, tmp_path: Path) -> None:
    clip = sample_frames(encode(tmp_path / f"two.{ending}", [0, 5000]), 2)
    assert (clip.fps, clip.timestamps[1]) == (pytest.approx(0.2), pytest.approx(5.0))
