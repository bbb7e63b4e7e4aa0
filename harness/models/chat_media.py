"""Pictures and video clips of a chat: opening them, and placing them in its text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from PIL.Image import Image

from espalier.harness.errors import UserError, brief
from espalier.harness.media import TRANSPARENCY
from espalier.harness.media.frames import Clip, sample_frames
from espalier.harness.media.images import open_image
from espalier.harness.settings import choice
from espalier.harness.specs.run_spec import VideoSpec

Chat = list[dict[str, Any]]

#: Marker of tasks for the position of a picture in a text.
MARK = "<image>"

#: Roles of turns.
ROLES = ("system", "user", "assistant")

#: Words for the parts of a turn, by type.
PARTS = {
    "image": "a picture (model.processor sets its size)",
    "video": "a video (model.video sets its frames, model.processor their size)",
    "text": "a text",
}


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
        UserError: required media are missing, a picture or video cannot be read, or something in the chat is not used.
    """
    media = Media()
    try:
        check_turns(chat)
        for turn in chat:
            for part in turn["content"]:
                check_part(part)
                if part["type"] == "image":
                    media.pictures.append(open_image(part["image"], transparency))
                elif part["type"] == "video":
                    media.clips.append(_clip(part["video"], video))
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


def check_turns(chat: Iterable[Mapping[str, Any]]) -> None:
    """Raise UserError for a turn of an unknown role or with unused keys, and for a chat that the model has answered."""
    role = None
    for turn in chat:
        role = choice("role", turn["role"], ROLES)
        refuse_unused("a turn", turn, ("role", "content"))
    if role != "user":
        raise UserError(
            f"role={role!r} of the last turn; valid: 'user', since the answer follows it"
        )


def check_part(part: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown type of a turn's parts, and for unused keys of a part or of its video."""
    kind = part["type"]
    if kind not in tuple(PARTS):
        raise UserError(f"{kind} in a chat; valid: {', '.join(PARTS)}")
    if kind == "video" and isinstance(part[kind], Mapping):
        refuse_unused(PARTS[kind], part[kind], ("type", "path", "url"))
    refuse_unused(PARTS[kind], part, ("type", kind))


def refuse_unused(holder: str, table: Mapping[str, Any], used: Iterable[str]) -> None:
    """Raise UserError for the first key outside `used` that has a value, since it would change nothing.

    Args:
        holder: words for the table.
        table: keys and values; None is no value.
        used: keys that are read.
    """
    for name, value in table.items():
        if name not in used and value is not None:
            raise UserError(
                f"{name}={brief(repr(value))} of {holder} of a chat is not used; valid: {', '.join(used)}"
            )


def _clip(source: Any, video: VideoSpec) -> Clip:
    """Return a clip as it is, and a file sampled by the run's rule.

    Raises:
        UserError: it is neither.
    """
    if isinstance(source, Clip):
        return source
    if not isinstance(source, str | PathLike):
        raise UserError(
            f"video={type(source).__name__} cannot be opened; valid: the path of a file"
        )
    return sample_frames(source, video.frames, video.rule, video.short, video.rate)
