"""Chats as another engine takes them: token ids with a placeholder for each item, pictures, and the counts expected."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from espalier.harness.cost.row_work import Work
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter, special_tokens
from espalier.harness.models.chat_media import Chat, Media


@dataclass(frozen=True)
class ServedPrompt:
    """One prompt.

    Attributes:
        words: the rendered text, with placeholders.
        ids: its token ids, one placeholder for each picture or video.
        adds_special: whether the tokenizer adds special tokens to the text.
        media: pictures and videos, ready for JSON.
        visual: visual tokens that a method may drop, of each picture or video.
        text: other tokens of the whole prompt.
        special: newline and separator tokens among them.
        work: cost before the decoder.
        blended: whether a visual token mixes several units of the projector.
    """

    words: str
    ids: tuple[int, ...]
    adds_special: bool
    media: tuple[Mapping[str, Any], ...]
    visual: tuple[int, ...]
    text: int
    special: int
    work: Work
    blended: bool


class ServedCodec:
    """Encodes chats with a model's adapter, which needs no weights for it.

    Args:
        adapter: of the model.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def encode(self, chats: Sequence[Chat]) -> Mapping[str, Any]:
        """Return the prompts of chats.

        Raises:
            UserError: as in `Adapter.prepare`, or videos that cannot be counted one by one.
        """
        return {"prompts": [served_prompt(self._adapter, chat) for chat in chats]}

    def preparer(self) -> Callable[[Sequence[Chat]], Mapping[str, Any]]:
        """Return `encode` for another thread."""
        return ServedCodec(self._adapter.thread_copy).encode

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the prompts: another process has the device."""
        return inputs

    def decode(self, ids: Tensor) -> list[str]:
        """Return the answers of (B, T) new tokens."""
        return self._adapter.decode(ids)

    def prompt_summary(self, chat: Chat) -> dict[str, str | None]:
        """Return the settings of prompts in a row."""
        return self._adapter.prompt_summary(chat)


def served_prompt(adapter: Adapter, chat: Chat) -> ServedPrompt:
    """Return the prompt of one chat; the model's processor runs, for the counts that the engine must agree with."""
    if not adapter.data.takes_video and any(
        part["type"] == "video" for turn in chat for part in turn["content"]
    ):
        raise UserError(f"a chat holds a video; model={adapter.spec.name!r} takes images only")
    media = adapter.load_media(chat, 0, adapter.spec.media == "required")
    text = adapter.prompt_text(chat, media)
    batch = adapter.process_batch([text], [media])
    layout = adapter.layout(batch)
    items = np.bincount(layout.picture[0, : layout.counts[0]]).tolist() if layout.counts[0] else []
    number = len(media.pictures) + len(media.clips)
    if number == 1 and items:
        items = [sum(items)]  # InternVL counts a video frame by frame
    if len(items) != number:
        raise UserError(
            f"backend=vllm: {number} pictures and videos of a prompt have {len(items)} parts; valid: one video a prompt"
        )
    tokenizer = adapter.processor.tokenizer
    options = special_tokens(tokenizer, [text])
    return ServedPrompt(
        words=text,
        ids=tuple(tokenizer(text, **options)["input_ids"]),
        adds_special=options.get("add_special_tokens", True),
        media=tuple(encoded_media(media)),
        visual=tuple(items),
        text=layout.text[0],
        special=layout.special[0],
        work=layout.work[0],
        blended=layout.blended[0],
    )


def encoded_media(media: Media) -> list[dict[str, Any]]:
    """Return pictures as PNG and the frames of videos as arrays, in base 64."""
    parts: list[dict[str, Any]] = []
    for picture in media.pictures:
        content = io.BytesIO()
        picture.save(content, "PNG", compress_level=1)
        parts.append({"kind": "image", "data": _text(content)})
    for clip in media.clips:
        content = io.BytesIO()
        np.save(content, clip.frames, allow_pickle=False)
        times: dict[str, Any] = {
            "fps": clip.fps,
            "frames_indices": list(clip.indices),
            "total_num_frames": clip.total_frames,
            "duration": clip.duration,
            "video_backend": "espalier",
            "do_sample_frames": False,
        }
        parts.append({"kind": "video", "data": _text(content), "metadata": times})
    return parts


def _text(content: io.BytesIO) -> str:
    return base64.b64encode(content.getvalue()).decode("ascii")
