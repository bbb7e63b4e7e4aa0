"""Convert a caller's pictures, videos and texts into chats for adapters.

Pictures may be PIL images, files, addresses, bytes, arrays and tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from mimetypes import guess_type
from os import PathLike, fspath
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from espalier.harness.errors import UserError, foreign
from espalier.harness.media import TRANSPARENCY
from espalier.harness.media.frames import Clip, sample_frames
from espalier.harness.media.images import open_image
from espalier.harness.models.chat_media import PARTS, Chat, check_turns, refuse_unused
from espalier.harness.settings import Positive, choice, read_value
from espalier.harness.specs.run_spec import ModelSpec

PICTURE = (
    "a PIL image, a path, an address (http, https), bytes of a file, an array or tensor of uint8 or of floats in "
    "[0, 1], espalier.video(...), a list of these, or None"
)
SHAPES = "(H, W), (H, W, 3) or (H, W, 4), of tensors also (3, H, W)"

#: Seconds to wait for an address, and the largest file in bytes.
PATIENCE, LARGEST = 20.0, 64 * 2**20

FRAMES = "a list of pictures of one size, or an array (T, H, W, 3) of uint8"
#: Keys of a picture or video in a part besides its type.
PLACES = ("path", "url")

CHAT = "a list of turns {'role': ..., 'content': ...}, a content being a text or a list of parts"


def opened_picture(source: Any, transparency: str) -> Image.Image:
    """Return a caller's picture as RGB, upright.

    Args:
        source: see `PICTURE`; floats are scaled by 255.
        transparency: as `model.transparency`.

    Raises:
        UserError: another type, shape or range, or nothing that can be opened.
    """
    if isinstance(source, torch.Tensor):
        source = _channels_last(source.detach().cpu())
    if isinstance(source, np.ndarray):
        source = _image_of(source)
    elif isinstance(source, str) and source.startswith(("http://", "https://")):
        source = _downloaded(source)
    if not isinstance(source, Image.Image | str | PathLike | bytes | Mapping):
        raise UserError(f"image={type(source).__name__} cannot be opened; valid: {PICTURE}")
    return open_image(source, transparency)


def _channels_last(tensor: torch.Tensor) -> np.ndarray:
    channels = (1, 3, 4)
    first = tensor.dim() == 3 and tensor.shape[0] in channels and tensor.shape[2] not in channels
    tensor = tensor.permute(1, 2, 0) if first else tensor
    tensor = tensor.float() if tensor.is_floating_point() else tensor
    return tensor.numpy()


def _image_of(array: np.ndarray) -> Image.Image:
    channels = (*array.shape, 1)[2] if array.ndim in (2, 3) else 0
    is_float = np.issubdtype(array.dtype, np.floating)
    if (array.dtype != np.uint8 and not is_float) or channels not in (1, 3, 4):
        raise UserError(
            f"image of shape {array.shape} and {array.dtype}; valid: uint8, or floats in [0, 1], of {SHAPES}"
        )
    if is_float:
        low, high = float(array.min(initial=0)), float(array.max(initial=0))
        if not (low >= 0 and high <= 1):  # NaN is neither
            raise UserError(
                f"image of {array.dtype} has values from {low:g} to {high:g}, such as pixels that a processor has "
                "normalised; valid: floats in [0, 1], or uint8"
            )
        array = np.rint(array * 255).astype(np.uint8)
    return Image.fromarray(array.squeeze(2) if array.shape[2:] == (1,) else array)


def _downloaded(address: str) -> bytes:
    problem, remedy = f"image {address!r} cannot be fetched", "an address that responds, or a path"
    with foreign(problem, remedy), urlopen(address, timeout=PATIENCE) as response:
        content: bytes = response.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise UserError(f"image {address!r} is larger than {LARGEST} bytes; valid: a path")
    return content


def video(source: Any, fps: float = 1.0, transparency: str = TRANSPARENCY[0]) -> Clip:
    """Return frames as one video; the model gets all of them.

    Args:
        source: a list of pictures of one size, or an array (T, H, W, 3) of uint8.
        fps: frames per second, for models that get frame times.
        transparency: `drop` uses the colours under transparent areas, `white` composites the pictures on white.

    Raises:
        UserError: no frames, or frames of different sizes.
    """
    choice("transparency", transparency, TRANSPARENCY)
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        raise UserError(f"video={type(source).__name__} is not a list of pictures; valid: {FRAMES}")
    frames = [np.asarray(opened_picture(frame, transparency)) for frame in source]
    if not frames or len({frame.shape for frame in frames}) > 1:
        raise UserError(
            f"video of {len(frames)} frames, shapes {sorted({frame.shape for frame in frames})}; "
            "valid: frames of one size"
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


def is_chat(value: Any) -> bool:
    """Return whether an argument is a chat rather than media."""
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and isinstance(value[0], Mapping)
        and "role" in value[0]
    )


def question_chat(media: Any, question: Any, spec: ModelSpec) -> Chat:
    """Return the chat of one question, with its pictures or video before the text.

    Raises:
        UserError: media that cannot be opened, or a question that is not a text.
    """
    if not isinstance(question, str):
        raise UserError(
            f"question={question!r} must be a text, or a list of texts about the same pictures"
        )
    is_list = isinstance(media, list | tuple)
    sources = [] if media is None else list(media) if is_list else [media]
    kinds = ["video" if _is_video(source) else "image" for source in sources]
    parts = [_medium(kind, source, spec) for kind, source in zip(kinds, sources, strict=True)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def open_chat(turns: Any, spec: ModelSpec) -> Chat:
    """Return a chat in the form that adapters read, with pictures opened and videos sampled.

    Raises:
        UserError: turns or parts of another form, or media that cannot be opened.
    """
    chat: Chat = []
    for number, turn in enumerate(turns):
        content = turn.get("content") if isinstance(turn, Mapping) else None
        if not isinstance(content, str | list | tuple) or "role" not in turn:
            raise UserError(f"turn {number} of the chat is {turn!r}; valid: {CHAT}")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        chat.append(
            {"role": turn["role"], "content": [_content_part(number, part, spec) for part in parts]}
        )
    check_turns(turns)
    return chat


def _content_part(number: int, part: Any, spec: ModelSpec) -> dict[str, Any]:
    part_type = str(part.get("type")) if isinstance(part, Mapping) else ""
    names = {"text": ("text",), "image": ("image", *PLACES), "video": ("video", *PLACES)}
    name = next((key for key in names.get(part_type, ()) if key in part), None)
    if name is None or (part_type == "text" and not isinstance(part["text"], str)):
        raise UserError(
            f"turn {number} of the chat holds {part!r}; valid: {{'type': 'text', 'text': ...}}, "
            "{'type': 'image', 'image': ...}, {'type': 'video', 'video': ...}"
        )
    refuse_unused(PARTS[part_type], part, ("type", name))
    if part_type == "text":
        return {"type": "text", "text": part["text"]}
    return _medium(part_type, part[name], spec)


def _is_video(source: Any) -> bool:
    """Return whether a medium is a video; a path is one if its suffix is that of a video."""
    if isinstance(source, str | PathLike):
        return (guess_type(fspath(source))[0] or "").startswith("video/")
    return isinstance(source, Clip) or (
        isinstance(source, np.ndarray | Tensor) and source.ndim == 4
    )


def _medium(kind: str, source: Any, spec: ModelSpec) -> dict[str, Any]:
    """Return the part of a picture (`image`) or of a video."""
    if kind == "image":
        return {"type": kind, kind: opened_picture(source, spec.transparency)}
    if isinstance(source, str | PathLike):
        rule = spec.video
        source = sample_frames(source, rule.frames, rule.rule, rule.short, rule.rate)
    elif not isinstance(source, Clip):
        source = video(source, transparency=spec.transparency)
    return {"type": kind, kind: source}
