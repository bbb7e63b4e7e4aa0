"""Media of a chat: every setting of a video is used, and requests that would be answered wrongly are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.media.frames import sample_frames
from espalier.harness.models import chat_media as chats
from espalier.harness.models.chat_media import Chat, media_of
from espalier.harness.specs.run_spec import VideoSpec

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
def test_a_piece_of_a_video_is_refused_wherever_it_is_asked_for(end: str, nested: bool) -> None:
    part: dict[str, Any] = {"type": "video", "video": "a.mp4"}
    part = {**part, "video": {"path": "a.mp4", end: 3}} if nested else {**part, end: 3}
    with pytest.raises(UserError, match=rf"^chat 4 of the batch: {end}=3 .*valid: whole videos$"):
        media_of(4, chat(part), VIDEO)


def test_something_to_see_is_demanded_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chats, "sample_frames", lambda *given: SimpleNamespace())
    assert media_of(0, chat(), VIDEO).pictures == []
    with pytest.raises(UserError, match=r"^chat 2 of the batch holds no image and no video"):
        media_of(2, chat(), VIDEO, required=True)
    assert len(media_of(0, chat(PICTURE), VIDEO, required=True).pictures) == 1
    assert len(media_of(0, chat({"type": "video", "video": "a"}), VIDEO, required=True).clips) == 1
