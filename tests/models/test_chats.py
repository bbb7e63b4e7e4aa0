"""Media of a chat: every setting of a video is used, and requests that would be answered wrongly are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from espalier.harness.api.questions import open_chat
from espalier.harness.errors import UserError
from espalier.harness.evaluation.prompt_text import chat_of
from espalier.harness.media.frames import Clip, sample_frames
from espalier.harness.models import chat_media as chats
from espalier.harness.models.chat_media import Chat, media_of
from espalier.harness.specs.run_spec import VideoSpec
from tests.tiny import LLAVA

VIDEO = VideoSpec(frames=6, rule="fps", short="all", rate=3.5)
PICTURE = {"type": "image", "image": Image.new("RGB", (4, 4))}


def chat(*parts: dict[str, Any]) -> Chat:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def test_every_setting_of_a_video_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def sample(path: Path, n_frames: int, rule: str, short: str, rate: float) -> Any:
        calls.append({"path": path, "frames": n_frames, "rule": rule, "short": short, "rate": rate})
        return SimpleNamespace()

    assert sample_frames.__code__.co_varnames[:5] == sample.__code__.co_varnames[:5]
    monkeypatch.setattr(chats, "sample_frames", sample)
    media = media_of(0, chat({"type": "video", "video": "a.mp4"}), VIDEO)
    settings = {field.name: getattr(VIDEO, field.name) for field in fields(VideoSpec)}
    assert calls == [{"path": "a.mp4", **settings}]
    assert (len(media.clips), len(media.pictures)) == (1, 0)


@pytest.mark.parametrize("end", ["video_start", "video_end"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_piece_of_a_video_is_refused_wherever_it_stands(end: str, nested: bool) -> None:
    part: dict[str, Any] = {"type": "video", "video": "a.mp4"}
    part = {**part, "video": {"path": "a.mp4", end: 3}} if nested else {**part, end: 3}
    with pytest.raises(
        UserError, match=rf"^chat 4 of the batch: {end}=3 of a video .*model\.video"
    ):
        media_of(4, chat(part), VIDEO)


KEYS = (
    *("max_pixels", "min_pixels", "total_pixels", "resized_height", "resized_width"),
    *("fps", "nframes", "max_frames", "video_start", "detail", "cache_control"),
)


@pytest.mark.parametrize("kind", ["image", "video", "text"])
@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_part_that_changes_nothing_is_refused(kind: str, key: str) -> None:
    clip = Clip(np.zeros((1, 4, 4, 3), np.uint8), (0,), (0.0,), 1.0, 1, 1.0)
    sources = {"image": PICTURE["image"], "video": clip, "text": "words"}
    part = {"type": kind, kind: sources[kind]}
    media_of(0, chat(part), VIDEO)
    media_of(0, chat({**part, key: None}), VIDEO)
    line = rf"{key}=4 of a \w+ .*of a chat is not used; valid: type, {kind}$"
    with pytest.raises(UserError, match=rf"^chat 4 of the batch: {line}"):
        media_of(4, chat({**part, key: 4}), VIDEO)
    with pytest.raises(UserError, match=line):
        open_chat(chat({**part, key: 4}), LLAVA)


@pytest.mark.parametrize(
    ("turns", "line"),
    [
        ([{"role": 5, "content": []}], r"role='5' is unknown; valid: assistant, system, user"),
        ([{"role": "tool", "content": []}], "role='tool' is unknown"),
        ([*chat(), {"role": "assistant", "content": []}], "role='assistant' of the last turn"),
        ([{**chat()[0], "name": "Ann"}], "name='Ann' of a turn .*valid: role, content$"),
        ([], "role=None of the last turn"),
    ],
)
def test_turns_that_a_prompt_would_not_show_are_refused(turns: Chat, line: str) -> None:
    with pytest.raises(UserError, match=f"^chat 4 of the batch: {line}"):
        media_of(4, turns, VIDEO)
    with pytest.raises(UserError, match=line):
        open_chat(turns, LLAVA)


def test_a_picture_is_given_once() -> None:
    with pytest.raises(UserError, match=r"path='a.png' of a picture .*valid: type, image$"):
        open_chat(chat({**PICTURE, "path": "a.png"}), LLAVA)


def test_a_task_s_messages_hold_what_lmms_eval_reads() -> None:
    messages = chat({"type": "video", "url": "a.mp4", "start_time": None})
    assert chat_of(messages) == chat({"type": "video", "video": "a.mp4"})
    for key, read in (("fps", "url, start_time, end_time"), ("video", "type, url")):
        part = {**messages[0]["content"][0], key: 2}
        with pytest.raises(UserError, match=rf"{key}=2 of a video .*{read}"):
            chat_of(chat(part))
    with pytest.raises(UserError, match=r"name='Ann' of a turn .*valid: role, content$"):
        chat_of([{**messages[0], "name": "Ann"}])


def test_something_to_see_is_demanded_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chats, "sample_frames", lambda *args: SimpleNamespace())
    assert media_of(0, chat(), VIDEO).pictures == []
    with pytest.raises(UserError, match=r"^chat 2 of the batch holds no image and no video"):
        media_of(2, chat(), VIDEO, required=True)
    assert len(media_of(0, chat(PICTURE), VIDEO, required=True).pictures) == 1
    assert len(media_of(0, chat({"type": "video", "video": "a"}), VIDEO, required=True).clips) == 1
