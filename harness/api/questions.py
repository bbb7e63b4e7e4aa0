"""What people hand over, pictures, videos and words, as chats that adapters read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from mimetypes import guess_type
from os import PathLike, fspath
from typing import Any

import numpy as np
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.media.frames import Clip, sample_frames
from espalier.harness.media.images import TRANSPARENCY, open_image
from espalier.harness.models.chat_media import Chat
from espalier.harness.settings import Positive, choice, read_value
from espalier.harness.specs.run_spec import ModelSpec

VALID = "a PIL image, a path, a numpy array of uint8, espalier.video(...), a list of these, or None"
FRAMES = "a list of pictures of one size, or an array (T, H, W, 3) of uint8"
CHAT = "a list of turns {'role': ..., 'content': ...}, a content being a text or a list of parts"


def video(source: Any, fps: float = 1.0, transparency: str = TRANSPARENCY[0]) -> Clip:
    """Return frames as one video, all of which the model sees.

    Args:
        source: a list of pictures of one size, or an array (T, H, W, 3) of uint8.
        fps: frames per second, for models that are told the time.
        transparency: of the pictures: `drop` takes the colours under it, `white` lays them on white.

    Raises:
        UserError: no frames, or frames of several sizes.
    """
    choice("transparency", transparency, TRANSPARENCY)
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        raise UserError(f"video={type(source).__name__} is no list of pictures; valid: {FRAMES}")
    frames = [np.asarray(_picture(one, transparency)) for one in source]
    if not frames or len({one.shape for one in frames}) > 1:
        raise UserError(
            f"video of {len(frames)} frames, shapes {sorted({one.shape for one in frames})}; valid: frames of one size"
        )
    fps = read_value("fps", fps, Positive)
    number = len(frames)
    return Clip(
        frames=np.stack(frames),
        indices=tuple(range(number)),
        timestamps=tuple(index / fps for index in range(number)),
        fps=fps,
        total_frames=number,
        duration=number / fps,
    )


def is_chat(asked: Any) -> bool:
    """Say whether something is a whole chat instead of pictures."""
    return (
        isinstance(asked, Sequence)
        and len(asked) > 0
        and isinstance(asked[0], Mapping)
        and "role" in asked[0]
    )


def single(media: Any, question: Any, spec: ModelSpec) -> Chat:
    """Return the chat of one question about pictures or a video, which stand before the words.

    Raises:
        UserError: something that cannot be opened, or a question that is no text.
    """
    if not isinstance(question, str):
        raise UserError(
            f"question={question!r} must be a text, or a list of texts about the same pictures"
        )
    several = isinstance(media, list | tuple)
    found = [] if media is None else list(media) if several else [media]
    parts = [_part(one, spec) for one in found]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def whole(turns: Any, spec: ModelSpec) -> Chat:
    """Return a chat in the form that adapters read, pictures opened and videos sampled.

    Raises:
        UserError: turns or parts of another form, or something that cannot be opened.
    """
    chat: Chat = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or {"role", "content"} - set(turn):
            raise UserError(f"turn {number} of the chat is {turn!r}; valid: {CHAT}")
        content = turn["content"]
        if not isinstance(content, str | list | tuple):
            raise UserError(f"turn {number} of the chat is {turn!r}; valid: {CHAT}")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        chat.append(
            {"role": turn["role"], "content": [_told(number, part, spec) for part in parts]}
        )
    return chat


def _told(number: int, part: Any, spec: ModelSpec) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    held = (
        [part[name] for name in (kind, "path") if name in part]
        if kind in ("image", "video")
        else []
    )
    if not held:
        raise UserError(
            f"turn {number} of the chat holds {part!r}; valid: {{'type': 'text', 'text': ...}}, "
            "{'type': 'image', 'image': ...}, {'type': 'video', 'video': ...}"
        )
    if kind == "image":
        return {"type": "image", "image": _picture(held[0], spec.transparency)}
    return {"type": "video", "video": _clip(held[0], spec)}


def _part(source: Any, spec: ModelSpec) -> dict[str, Any]:
    """Return a picture or a video, told apart by what it is, and a path by its ending."""
    if _is_video(source):
        return {"type": "video", "video": _clip(source, spec)}
    return {"type": "image", "image": _picture(source, spec.transparency)}


def _is_video(source: Any) -> bool:
    if isinstance(source, str | PathLike):
        return (guess_type(fspath(source))[0] or "").startswith("video/")
    return isinstance(source, Clip) or (isinstance(source, np.ndarray) and source.ndim == 4)


def _clip(source: Any, spec: ModelSpec) -> Clip:
    if isinstance(source, Clip):
        return source
    if isinstance(source, str | PathLike):
        rule = spec.video
        return sample_frames(source, rule.frames, rule.rule, rule.short, rule.rate)
    return video(source, transparency=spec.transparency)


def _picture(source: Any, transparency: str) -> Image.Image:
    if isinstance(source, np.ndarray):
        shape = (*source.shape, 1)[2] if source.ndim in (2, 3) else 0
        if source.dtype != np.uint8 or shape not in (1, 3, 4):
            raise UserError(
                f"image of shape {source.shape} and {source.dtype}; valid: uint8 of (H, W), (H, W, 3) or (H, W, 4)"
            )
        source = Image.fromarray(source.squeeze(2) if source.shape[2:] == (1,) else source)
    if not isinstance(source, Image.Image | str | PathLike | bytes | Mapping):
        raise UserError(f"image={type(source).__name__} cannot be opened; valid: {VALID}")
    return open_image(source, transparency)
