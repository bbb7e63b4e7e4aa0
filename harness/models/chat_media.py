"""Pictures and video clips of a chat: opening them, and placing them in its text."""

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

#: Marker of tasks for the position of a picture in a text.
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
        number: index of the chat in its batch, for error lines.
        chat: turns with a list of parts as content.
        video: rule for sampling frames.
        required: refuse a chat without pictures and videos.
        transparency: handling of transparent pictures, one of TRANSPARENCY.

    Raises:
        UserError: required media are missing, or a picture or video cannot be read.
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


def place_media(chat: Chat, placeholders: Iterable[str], picture: str | None) -> Chat:
    """Return a chat with placeholders in its texts only at the positions of its pictures.

    If the texts hold as many marks as the chat has pictures, each mark becomes a placeholder and replaces the picture's
    part. Otherwise all marks and placeholders are removed from the texts, as in lmms-eval's classes for Qwen.

    Args:
        chat: turns with a list of parts as content.
        placeholders: texts that the family's processor replaces with tokens of pictures and videos.
        picture: placeholder of a picture; None if the family's texts cannot mark positions.
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
    """Return the clip of a video part: a clip as it is, a file sampled by the run's rule."""
    if isinstance(part["video"], Clip):
        return part["video"]
    return sample_frames(_whole_video(part), video.frames, video.rule, video.short, video.rate)


def _whole_video(part: Mapping[str, Any]) -> str | PathLike[str]:
    """Return the file of a video part.

    Raises:
        UserError: the part requests a segment of the video, which is not supported, or is not a file.
    """
    source = part["video"]
    options = {**part, **source} if isinstance(source, Mapping) else part
    for end in ("video_start", "video_end"):
        if options.get(end):
            raise UserError(
                f"{end}={options[end]} selects a segment of a video; valid: whole videos"
            )
    if not isinstance(source, str | PathLike):
        raise UserError(
            f"video={type(source).__name__} cannot be opened; valid: the path of a file"
        )
    return source
