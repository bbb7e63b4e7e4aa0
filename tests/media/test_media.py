"""Frames and images from real files, compared with a slow decode of all frames and with known pixels."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile
from transformers.models.llava_onevision.video_processing_llava_onevision import (
    LlavaOnevisionVideoProcessor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from espalier.harness.errors import UserError
from espalier.harness.media import frames, timeline
from espalier.harness.media import frames as decoding
from espalier.harness.media.frame_rules import (
    THINNED,
    each_second,
    rule_indices,
    target_count,
    thinned_indices,
)
from espalier.harness.media.frames import sample_frames
from espalier.harness.media.images import open_image
from espalier.harness.media.timeline import _video_stream, read_timeline

H264 = {"preset": "ultrafast", "x264-params": "keyint=12:bframes=3:b-adapt=0:scenecut=0"}
OPEN_GOP = {"preset": "ultrafast", "x264-params": "keyint=10:bframes=3:b-adapt=0:open-gop=1"}
REFRESH = {"x264-params": "keyint=20:intra-refresh=1:bframes=0:scenecut=0"}
MPEG4 = {"bf": "2", "g": "12"}


def picture(index: int, height: int = 32, width: int = 48) -> np.ndarray:
    """A picture that no other index shares."""
    noise = np.random.default_rng(7).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.ascontiguousarray(np.roll(noise, 2 * index, axis=1) // 2 + index % 100)


def silence(samples: int, at: int) -> av.AudioFrame:
    quiet = np.zeros((1, samples), np.float32)
    frame = av.AudioFrame.from_ndarray(quiet, format="fltp", layout="mono")
    frame.rate, frame.pts = 16000, at
    return frame


def encode(
    path: Path,
    count: int,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    milliseconds: Sequence[int] | None = None,
    container: str | None = None,
    mux: dict[str, str] | None = None,
    sound: bool = False,
    draw: Callable[[int], np.ndarray] = picture,
    rate: int | Fraction = 25,
    pixels: str = "yuv420p",
) -> Path:
    """Write a video of 25 frames per second, or one with the given frame times; its header states `rate`."""
    base = Fraction(1, 1000) if milliseconds else Fraction(1, 25)
    height, width = draw(0).shape[:2]
    with av.open(str(path), "w", format=container, options=mux or {}) as out:
        stream = out.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.codec_context.time_base = base
        track = out.add_stream("aac", rate=16000) if sound else None
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(draw(index), format="rgb24").reformat(format=pixels)
            frame.pts, frame.time_base = (milliseconds[index] if milliseconds else index), base
            out.mux(stream.encode(frame))
            if track is not None and index % 2 == 0:
                out.mux(track.encode(silence(1280, index * 640)))
        out.mux(stream.encode(None))
        if track is not None:
            out.mux(track.encode(None))
    return path


def decode_everything(path: Path) -> tuple[list[np.ndarray], list[float]]:
    """The slow reference: all frames in order, and seconds since the first."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        # One thread: no race can change what the others are held against.
        stream.thread_type, stream.thread_count = "NONE", 1
        frames = list(container.decode(stream))
        times = [float(f.pts * f.time_base) if f.pts is not None else float("nan") for f in frames]
        return [f.to_ndarray(format="rgb24") for f in frames], [t - times[0] for t in times]


VIDEOS = {
    "h264.mp4": lambda path: encode(path, 60, options=H264),
    "h264.mkv": lambda path: encode(path, 60, options=H264),
    "open_gop.mkv": lambda path: encode(path, 60, options=OPEN_GOP),
    "open_gop.ts": lambda path: encode(path, 60, options=OPEN_GOP, container="mpegts"),
    "mpeg4.mp4": lambda path: encode(path, 60, "mpeg4", MPEG4),
    "vp9.webm": lambda path: encode(path, 30, "libvpx-vp9", {"g": "10", "deadline": "realtime"}),
    "mpeg2.mpg": lambda path: encode(path, 40, "mpeg2video", MPEG4),
    "variable.mp4": lambda path: encode(
        path, 60, options=H264, milliseconds=[i * i * 7 for i in range(60)]
    ),
    "late.mp4": lambda path: encode(
        path, 60, options=H264, milliseconds=[2000 + 40 * i for i in range(60)]
    ),
    "trimmed.mp4": lambda path: encode(
        path, 60, options=H264, milliseconds=[40 * (i - 17) for i in range(60)]
    ),
    "fragments.mp4": lambda path: encode(
        path, 60, options=H264, mux={"movflags": "frag_keyframe+empty_moov"}
    ),
    "sound.mp4": lambda path: encode(path, 60, options=H264, sound=True),
    # Files whose packets do not tell the truth.
    "reordered.avi": lambda path: encode(path, 60, options=H264),
    "untimed.h264": lambda path: encode(path, 60, options=H264, container="h264"),
    "refresh.mp4": lambda path: encode(path, 60, options=REFRESH),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return encode(folder / "plain.mp4", 60, options=H264)


# Rules


@given(st.integers(1, 5000), st.integers(1, 300), st.sampled_from(["uniform", "centre", "fps"]))
def test_indices_ascend_differ_and_lie_within(total: int, count: int, rule: str) -> None:
    taken = rule_indices(total, min(count, total), rule)
    assert (len(taken), list(taken)) == (min(count, total), sorted(set(taken)))
    assert taken[0] >= 0
    assert taken[-1] < total


@given(st.integers(2, 5000), st.integers(2, 300), st.floats(0.1, 30), st.floats(1, 60))
def test_the_rate_rule_takes_an_even_number_within_its_cap(
    total: int, cap: int, rate: float, fps: float
) -> None:
    taken = target_count(total, cap, "fps", rate, fps)
    assert taken % 2 == 0
    assert 2 <= taken <= min(cap, total)
    if 4 <= total / fps * rate <= min(cap, total) - 2:
        assert abs(taken - total / fps * rate) < 2


@pytest.mark.parametrize("total", [2, 33, 100, 999, 5400, 1_000_003])
@pytest.mark.parametrize("count", [1, 2, 7, 32, 768])
def test_rules_are_those_of_the_evaluations(total: int, count: int) -> None:
    count = min(count, total - 1)
    assert rule_indices(total, count, "uniform") == tuple(
        np.linspace(0, total - 1, count, dtype=int)
    )
    segment = float(total - 1) / count
    assert rule_indices(total, count, "centre") == tuple(
        int(0 + (segment / 2) + np.round(segment * i)) for i in range(count)
    )
    assert rule_indices(total, count, "fps") == tuple(
        np.linspace(0, total - 1, count).round().astype(int)
    )


@pytest.mark.parametrize(
    ("total", "count", "rule", "indices"),
    [
        (101, 1, "uniform", (0,)),
        (101, 1, "centre", (50,)),
        (3, 3, "centre", (0, 1, 2)),
        (10, 4, "floor", (0, 2, 5, 7)),
        (7, 6, "pairs", (0, 1, 2, 4, 5, 6)),
    ],
)
def test_indices_by_hand(total: int, count: int, rule: str, indices: tuple[int, ...]) -> None:
    assert rule_indices(total, count, rule) == indices


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ((250, 768, "fps", 2.0, 25.0), 20),  # ten seconds
        ((250, 8, "fps", 2.0, 25.0), 8),  # capped
        ((25, 768, "fps", 2.0, 25.0), 4),  # one second, and at least four
        ((3, 768, "fps", 2.0, 25.0), 2),  # even
        ((290, 768, "fps", 1.0, 29.0), 10),
        ((1000, 33, "pairs", 2.0, 30.0), 32),
        ((7, 32, "pairs", 2.0, 30.0), 6),
        ((1, 32, "pairs", 2.0, 30.0), 2),
    ],
)
def test_counts_by_hand(arguments: tuple[Any, ...], count: int) -> None:
    assert target_count(*arguments) == count


# Frames


@pytest.mark.sampled
@pytest.mark.parametrize("name", VIDEOS)
def test_frames_are_exactly_those_of_a_full_decode(name: str, folder: Path) -> None:
    path = VIDEOS[name](folder / name)
    every, times = decode_everything(path)
    fps = sample_frames(path, 1).fps
    for count, rule in [(1, "uniform"), (5, "uniform"), (7, "centre"), (6, "fps"), (13, "uniform")]:
        clip = sample_frames(path, count, rule)
        assert clip.total_frames == len(every)
        wanted = target_count(len(every), count, rule, 2.0, fps)
        assert clip.indices == rule_indices(len(every), wanted, rule)
        assert clip.frames.dtype == np.uint8
        for place, index in enumerate(clip.indices):
            np.testing.assert_array_equal(clip.frames[place], every[index])
        if not np.isnan(times[-1]) and not name.endswith(".avi"):
            assert clip.timestamps == pytest.approx([times[i] for i in clip.indices])
    np.testing.assert_array_equal(sample_frames(path, len(every)).frames, np.stack(every))


@pytest.mark.parametrize(
    ("name", "grouped"),
    [
        ("h264.mp4", True),
        ("open_gop.mkv", True),
        ("trimmed.mp4", True),
        ("reordered.avi", False),
        ("refresh.mp4", False),
    ],
)
def test_trusted_packets_are_decoded_in_groups(
    name: str, grouped: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = VIDEOS[name](folder / f"again_{name}")
    through: list[object] = []
    real = frames.decode_through
    monkeypatch.setattr(
        frames, "decode_through", lambda *args: (through.append(args), real(*args))[1]
    )
    sample_frames(path, 5)
    assert len(through) == (0 if grouped else 1)


def test_times_that_a_demuxer_made_up_are_not_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = VIDEOS["reordered.avi"](folder / "made_up.avi")
    assert read_timeline(path) is None
    every, _ = decode_everything(path)
    monkeypatch.setattr(timeline, "UNTIMED", ())
    believed = read_timeline(path)
    assert believed is not None
    wrong = []
    for index in range(60):
        frames = decoding.decode_groups(path, believed, [index])
        if frames is not None and not np.array_equal(frames[0], every[index]):
            wrong.append(index)
    assert wrong  # alone in its group, a frame in the wrong place looks right


def test_only_the_groups_that_hold_wanted_frames_are_decoded(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = read_timeline(plain)
    assert listed is not None
    fed: list[object] = []
    real = decoding._through

    def counted(*args: object) -> list[av.VideoFrame]:
        fed.extend(frames := list(real(*args)))
        return frames

    monkeypatch.setattr(decoding, "_through", counted)
    decoded = decoding.decode_groups(plain, listed, [0, 30, 59])
    every, _ = decode_everything(plain)
    np.testing.assert_array_equal(decoded, np.stack([every[0], every[30], every[59]]))
    # One frame of the first group of twelve, at most ten of the third, twelve of the last.
    assert len(fed) <= 1 + 10 + 12


def test_times_follow_a_variable_rate_and_start_at_zero(folder: Path) -> None:
    slow = [2000 + 100 * i + (3000 if i > 20 else 0) for i in range(30)]
    clip = sample_frames(encode(folder / "gap.mp4", 30, milliseconds=slow, options=H264), 30)
    assert clip.timestamps == pytest.approx([(at - 2000) / 1000 for at in slow], abs=1e-3)
    assert clip.duration == pytest.approx(5.9 + 1 / clip.fps, abs=1e-3)
    assert clip.fps == pytest.approx(30 / 6, rel=0.05)


def test_headers_that_state_too_many_frames_are_not_believed(folder: Path) -> None:
    trimmed = VIDEOS["trimmed.mp4"](folder / "edited.mp4")
    with av.open(str(trimmed)) as container:
        assert container.streams.video[0].frames == 60
    assert sample_frames(trimmed, 43).total_frames == 43

    data = bytearray(encode(folder / "plain.avi", 60, "mpeg4", MPEG4).read_bytes())
    at = data.index(b"strh") + 8 + 32  # dwLength
    assert struct.unpack_from("<I", data, at) == (60,)
    struct.pack_into("<I", data, at, 80)
    lying = folder / "lying.avi"
    lying.write_bytes(data)
    clip = sample_frames(lying, 8)
    assert (clip.total_frames, clip.indices[-1]) == (60, 59)


def test_rotation_is_applied(folder: Path) -> None:
    def corner(_: int) -> np.ndarray:
        drawn = np.zeros((32, 64, 3), np.uint8)
        drawn[:16, :16] = 255
        return drawn

    path = encode(folder / "upright.mp4", 3, options=H264, draw=corner)
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40  # the matrix: x' = -y, y' = x, a quarter turn clockwise
    full_turn = 1 << 16
    struct.pack_into(">9i", data, at, 0, full_turn, 0, -full_turn, 0, 0, 0, 0, 1 << 30)
    turned = folder / "turned.mp4"
    turned.write_bytes(data)
    assert sample_frames(path, 1).frames.shape == (1, 32, 64, 3)
    frame = sample_frames(turned, 1).frames[0]
    assert frame.shape == (64, 32, 3)
    bright = frame.mean(-1)
    assert bright[:12, 20:].min() > 200  # the marked corner is now at the top right
    assert bright[20:].max() < 50


def test_a_short_video_is_an_error_or_each_frame_once(folder: Path) -> None:
    path = encode(folder / "short.mp4", 5, options=H264)
    with pytest.raises(UserError, match=r"model\.video\.frames=8.*short\.mp4.* 5 frames, .*8"):
        sample_frames(path, 8, short="error")
    for rule in ("uniform", "centre"):
        clip = sample_frames(path, 8, rule, short="all")
        assert clip.indices == (0, 1, 2, 3, 4)
        np.testing.assert_array_equal(clip.frames, np.stack(decode_everything(path)[0]))
    assert sample_frames(path, 8, "fps", short="error").indices == (0, 1, 3, 4)
    lone = encode(folder / "lone.mp4", 1, options=H264)
    assert sample_frames(lone, 1).duration > 0
    assert sample_frames(lone, 8, "fps", short="all").indices == (0,)
    with pytest.raises(UserError, match="1 frames, fewer than 2"):
        sample_frames(lone, 8, "fps", short="error")


@pytest.mark.parametrize("total", [1, 3, 5])
def test_frames_of_a_short_video_repeat_as_in_the_evaluations(folder: Path, total: int) -> None:
    """The formulas of lmms-eval's LLaVA-OneVision and InternVL classes, which know no shortest video."""
    path = encode(folder / "few.mp4", total, options=H264)
    frames = np.stack(decode_everything(path)[0])
    segment = (total - 1) / 8
    for rule, expected in {
        "uniform": [int(place) for place in np.linspace(0, total - 1, 8)],
        "centre": [int(segment / 2 + np.round(segment * place)) for place in range(8)],
    }.items():
        clip = sample_frames(path, 8, rule)
        assert list(clip.indices) == expected
        assert len(set(expected)) < 8
        np.testing.assert_array_equal(clip.frames, frames[expected])
        assert len(clip.timestamps) == len(clip.metadata()["frames_indices"]) == 8
    assert sample_frames(path, 8, "fps").indices == {1: (0, 0), 3: (0, 2), 5: (0, 1, 3, 4)}[total]


def test_one_frame_a_second_of_a_short_video(folder: Path) -> None:
    path = encode(folder / "brief.mp4", 60, options=H264)
    assert sample_frames(path, 64, short="second").indices == (0, 25, 50)
    assert sample_frames(path, 60, short="second").indices == tuple(range(60))
    assert each_second(4, 1 / 3) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_frames": 0}, r"model\.video\.frames=0 .*at least 1"),
        ({"n_frames": 1, "rule": "fps"}, r"model\.video\.frames=1 .*at least 2"),
        ({"n_frames": 4, "rule": "uniforn"}, r"model\.video\.rule='uniforn'.*did you mean uniform"),
        ({"n_frames": 4, "short": "loop"}, r"model\.video\.short='loop'.*valid: all, error"),
        ({"n_frames": 4, "rule": "fps", "rate": 0.0}, r"model\.video\.rate=0\.0"),
        ({"n_frames": 4, "rule": "fps", "rate": float("nan")}, r"model\.video\.rate=nan"),
    ],
)
def test_bad_arguments_are_refused_before_the_file(
    arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        sample_frames("no such file.mp4", **arguments)  # type: ignore[arg-type]


def test_titles_that_are_not_utf8_do_no_harm(folder: Path) -> None:
    data = encode(folder / "titled.mkv", 5, options=H264).read_bytes()
    (folder / "latin.mkv").write_bytes(data.replace(b"Lavf", b"\xfcavf"))
    with pytest.raises(UnicodeDecodeError):
        av.open(str(folder / "latin.mkv"))
    assert sample_frames(folder / "latin.mkv", 5).total_frames == 5


def test_files_that_are_no_videos_are_named(folder: Path) -> None:
    (folder / "text.mp4").write_text("not a video " * 50)
    (folder / "empty.mp4").write_bytes(b"")
    Image.new("RGB", (8, 8)).save(folder / "still.jpg")
    Image.new("RGB", (8, 8)).save(folder / "still.png")
    (folder / "renamed.mp4").write_bytes((folder / "still.png").read_bytes())
    with av.open(str(folder / "sound.m4a"), "w") as out:
        track = out.add_stream("aac", rate=16000)
        out.mux([*track.encode(silence(1024, 0)), *track.encode(None)])
    (folder / "directory.mp4").mkdir()
    cases = {
        "missing.mp4": "does not exist",
        "directory.mp4": "is not a file",
        "text.mp4": "cannot be opened",
        "empty.mp4": "cannot be opened",
        "still.jpg": "is an image",
        "still.png": "is an image",
        "renamed.mp4": "is an image",
        "sound.m4a": "no video stream",
    }
    for name, words in cases.items():
        with pytest.raises(UserError, match=words) as error:
            sample_frames(folder / name, 2)
        assert name in str(error.value)


def test_cover_art_is_no_video_wherever_it_stands() -> None:
    cover = SimpleNamespace(disposition=Disposition.attached_pic, codec_context=object())
    film = SimpleNamespace(disposition=Disposition.default, codec_context=object())

    def holding(*streams: object) -> Any:
        return SimpleNamespace(
            format=SimpleNamespace(name="mp4"), streams=SimpleNamespace(video=streams)
        )

    assert _video_stream(holding(cover, film), "a") is film
    assert _video_stream(holding(film, cover), "a") is film
    with pytest.raises(UserError, match="'a' has no video stream"):
        _video_stream(holding(cover), "a")


def test_files_that_lost_their_end_are_refused(folder: Path) -> None:
    front = {"movflags": "faststart"}  # the index comes first, so that the rest can still be opened
    whole = encode(folder / "whole.mp4", 100, options=H264, mux=front).read_bytes()
    with av.open(str(folder / "whole.mp4")) as container:
        starts = [p.pos for p in container.demux(container.streams.video[0]) if p.size]
    for name, data in {
        "torn.mp4": whole[: starts[60] + 5],
        "clean.mp4": whole[: starts[60]],  # cut between two frames
        "nearly.mp4": whole[:-3],
    }.items():
        (folder / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name}' is truncated"):
            sample_frames(folder / name, 4)
    tail = encode(folder / "tail.mp4", 60, options=H264).read_bytes()
    (folder / "headless.mp4").write_bytes(tail[: len(tail) // 2])
    with pytest.raises(UserError, match=r"headless\.mp4' cannot be opened"):
        sample_frames(folder / "headless.mp4", 4)
    matroska = encode(folder / "whole.mkv", 100, options=H264).read_bytes()
    (folder / "cut.mkv").write_bytes(matroska[: len(matroska) // 2])
    with pytest.raises(UserError, match=r"cut\.mkv' is truncated"):
        sample_frames(folder / "cut.mkv", 4)


def test_damage_ends_in_a_clip_or_in_one_line(folder: Path) -> None:
    rng = np.random.default_rng(3)
    whole = encode(folder / "sane.mkv", 40, options=H264).read_bytes()
    clips, refusals = [], []
    for _ in range(40):
        data = bytearray(whole)
        at = int(rng.integers(200, len(data) - 40))
        data[at : at + 30] = rng.bytes(30)
        (folder / "hurt.mkv").write_bytes(data)
        try:
            clips.append(sample_frames(folder / "hurt.mkv", 6, short="all"))
        except UserError as refusal:
            refusals.append(str(refusal))
    assert clips
    for clip in clips:
        assert len(clip.frames) == len(set(clip.indices)) == min(6, clip.total_frames)
    for line in refusals:
        assert "hurt.mkv" in line
        assert "\n" not in line


def test_processors_take_a_clip_as_it_is(plain: Path) -> None:
    clip = sample_frames(plain, 4)
    arguments = {"videos": clip.frames, "video_metadata": clip.metadata(), "return_tensors": "pt"}
    arguments |= {"do_sample_frames": False, "return_metadata": True}
    args = LlavaOnevisionVideoProcessor(size={"height": 28, "width": 28})(**arguments)
    assert args["pixel_values_videos"].shape == (1, 4, 3, 28, 28)
    assert args["video_metadata"][0].frames_indices == list(clip.indices)
    assert args["video_metadata"][0].timestamps == pytest.approx(list(clip.timestamps))
    qwen = Qwen2VLVideoProcessor()(**arguments)
    assert qwen["video_grid_thw"][0, 0] == 2  # four frames in two pairs
    assert qwen["video_metadata"][0].sampled_fps == pytest.approx(4 / clip.duration)


# Images


def stored(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def marked() -> Image.Image:
    """Red in its left upper quarter."""
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:10, :20, 0] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    "how", ["path", "string", "bytes", "dict of bytes", "dict of path", "both"]
)
def test_every_form_of_an_image_opens_to_the_same_pixels(how: str, tmp_path: Path) -> None:
    data = stored(marked())
    path = tmp_path / "image.png"
    path.write_bytes(data)
    source = {
        "path": path,
        "string": str(path),
        "bytes": data,
        "dict of bytes": {"bytes": data, "path": "gone.png"},
        "dict of path": {"bytes": None, "path": str(path)},
        "both": {"bytes": data, "path": None},
    }[how]
    opened = open_image(source)
    assert opened.mode == "RGB"
    np.testing.assert_array_equal(opened, marked())
    np.testing.assert_array_equal(open_image(opened), marked())


def test_orientation_is_applied_once_to_files_bytes_and_open_images(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown a quarter turn clockwise
    data = stored(marked(), exif=exif)
    turned = open_image(data)
    assert turned.size == (20, 40)
    assert np.asarray(turned)[:20, 10:, 0].min() == 255
    assert open_image(turned).size == (20, 40)
    (tmp_path / "image.png").write_bytes(data)
    assert open_image(tmp_path / "image.png").size == (20, 40)
    assert open_image({"bytes": data, "path": None}).size == (20, 40)
    for image in (Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data)).convert("RGB")):
        np.testing.assert_array_equal(open_image(image), turned)


def test_transparency_is_dropped_and_other_modes_are_converted() -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert open_image(stored(clear)).getpixel((0, 0)) == (10, 20, 30)
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        assert open_image(stored(Image.new(mode, (4, 3)))).mode == "RGB"
    assert open_image(stored(Image.new("CMYK", (4, 3)), "JPEG")).mode == "RGB"


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "BMP"])
def test_half_an_image_is_refused_whatever_others_switched(
    form: str, switch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", switch)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = stored(Image.fromarray(noise), form)
    half = data[: len(data) // 2]
    with pytest.raises(UserError, match="'bytes' cannot be read"):
        open_image(half)
    (tmp_path / "half.image").write_bytes(half)
    with pytest.raises(UserError, match=r"half\.image' cannot be read"):
        open_image(tmp_path / "half.image")
    assert switch is ImageFile.LOAD_TRUNCATED_IMAGES


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.png").write_text("<html>not found</html>")
    cases = [
        (tmp_path / "missing.png", "missing.png' does not exist"),
        (tmp_path, "is not a file"),
        (tmp_path / "page.png", "page.png' cannot be read"),
        (b"", "'bytes' cannot be read"),
        (b"nonsense", "'bytes' cannot be read"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ({}, "neither bytes nor a path"),
        (7, "image=int cannot be opened; valid: a PIL image"),
    ]
    for source, words in cases:
        with pytest.raises(UserError, match=words):
            open_image(source)  # type: ignore[arg-type]


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match="'bytes' has more than 200 pixels"):
        open_image(stored(marked()))


#: Two a second of ten seconds are twenty, at whole frames over the whole video.
TWENTY = tuple(int(place) for place in np.linspace(0, 299, 20).round())


@pytest.mark.parametrize(
    ("arguments", "indices"),
    [
        # Ten seconds at 30 a second: one frame a second, unless five must do.
        ((300, 64, "fps_then_uniform", 1.0, 29.97), range(0, 300, 30)),
        ((300, 5, "fps_then_uniform", 1.0, 29.97), (0, 74, 149, 224, 299)),
        ((300, 64, "fps_then_uniform", 2.0, 30.0), range(0, 300, 15)),
        ((300, 32, "fps_then_few", 2.0, 30.0), TWENTY),
        (
            (300, 8, "fps_then_few", 2.0, 30.0),
            [TWENTY[int(place)] for place in np.linspace(0, 19, 8)],
        ),
    ],
)
def test_rules_by_the_clock_thin_out_only_what_is_too_much(
    arguments: tuple[Any, ...], indices: Sequence[int]
) -> None:
    assert thinned_indices(*arguments) == tuple(indices)


@given(st.integers(1, 5000), st.integers(1, 300), st.floats(1, 120))
def test_thinned_frames_ascend_and_never_repeat(total: int, count: int, fps: float) -> None:
    for rule in THINNED:
        frames = thinned_indices(total, max(count, 2), rule, 1.0, fps)
        assert frames[0] >= 0
        assert frames[-1] < total
        if total >= 4:
            assert list(frames) == sorted(set(frames))
            assert len(frames) <= max(count, 2)
