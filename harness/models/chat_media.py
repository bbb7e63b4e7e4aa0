"""What a chat holds beside its text: pictures and video clips, read from wherever they are, and where they belong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError
from espalier.harness.media.frames import Clip, sample_frames
from espalier.harness.media.images import TRANSPARENCY, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

    from espalier.harness.specs.run_spec import VideoSpec

Chat = list[dict[str, Any]]

#: How tasks write into a text that a picture belongs there.
MARK = "<image>"


@dataclass(frozen=True)
class Media:
    """The pictures and clips of one chat, each in the order of the chat."""

    pictures: list[Image] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)


def media_of(
    number: int,
    chat: Chat,
    video: VideoSpec,
    required: bool = False,
    transparency: str = TRANSPARENCY[0],
) -> Media:
    """Open every picture and sample every video of a chat.

    Args:
        number: place of the chat in its batch, for messages.
        chat: turns whose content is a list of parts.
        video: how frames are sampled.
        required: whether a chat without picture and video is refused.
        transparency: what becomes of that of pictures, one of TRANSPARENCY.

    Raises:
        UserError: nothing to see in the chat where something must be, or something that cannot be read.
    """
    media = Media()
    try:
        for turn in chat:
            for part in turn["content"]:
                if part["type"] == "image":
                    media.pictures.append(open_image(part["image"], transparency))
                elif part["type"] == "video":
                    media.clips.append(_clip(part, video))
                elif part["type"] != "text":
                    raise UserError(f"{part['type']} in a chat; valid: image, video, text")
    except UserError as error:
        raise UserError(f"chat {number} of the batch: {error}") from error
    if required and not media.pictures and not media.clips:
        raise UserError(
            f"chat {number} of the batch holds no image and no video (model.media=required; valid: optional)"
        )
    return media


def marked(chat: Chat, placeholders: Iterable[str], picture: str | None) -> Chat:
    """Return a chat whose texts hold a placeholder only where one of its pictures belongs.

    Texts with as many marks as the chat has pictures say where these belong: each mark becomes the placeholder, and the
    picture is no part of its own any more. Otherwise marks, and whatever else a processor would take for a placeholder,
    go, as in lmms-eval's classes for Qwen.

    Args:
        chat: turns whose content is a list of parts.
        placeholders: texts that the family's processor replaces by tokens of pictures and videos.
        picture: the one for a picture; None if the family's texts cannot say where pictures belong.
    """
    parts = [part for turn in chat for part in turn["content"]]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    reserved = {MARK, *placeholders}
    if not any(word in text for word in reserved for text in texts):
        return chat
    marks = sum(text.count(MARK) for text in texts)
    inline = picture is not None and marks == sum(part["type"] == "image" for part in parts)

    def clean(text: str) -> str:
        pieces = text.split(MARK)
        for word in reserved:
            pieces = [piece.replace(word, "") for piece in pieces]
        return (picture if picture is not None and inline else "").join(pieces)

    return [
        {
            **turn,
            "content": [
                {**part, "text": clean(part["text"])} if part["type"] == "text" else part
                for part in turn["content"]
                if not (inline and part["type"] == "image")
            ],
        }
        for turn in chat
    ]


def _clip(part: Mapping[str, Any], video: VideoSpec) -> Clip:
    """Return the frames of a video part: those of a clip as they are, those of a file by the run's rule."""
    if isinstance(part["video"], Clip):
        return part["video"]
    return sample_frames(_whole_video(part), video.frames, video.rule, video.short, video.rate)


def _whole_video(part: Mapping[str, Any]) -> str | PathLike[str]:
    """Return the file of a video part.

    Raises:
        UserError: only a piece of the video is asked for, which would be answered from all of it; or it is no file.
    """
    source = part["video"]
    options = {**part, **source} if isinstance(source, Mapping) else part
    for end in ("video_start", "video_end"):
        if options.get(end):
            raise UserError(
                f"{end}={options[end]} asks for a piece of a video; valid: whole videos"
            )
    if not isinstance(source, str | PathLike):
        raise UserError(
            f"video={type(source).__name__} cannot be opened; valid: the path of a file"
        )
    return source
