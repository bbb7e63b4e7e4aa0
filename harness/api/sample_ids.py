"""Ids of questions asked from Python: a hash of their texts, pictures and videos."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from espalier.harness.media.frames import Clip
from espalier.harness.models.chat_media import Chat


def sample_ids(chats: Sequence[Chat]) -> list[str]:
    """Return 12 hex digits for each chat, a hash of its content in order.

    They seed the random draws of a sample. Cost: one pass over the pixels, once for media that chats share.

    Args:
        chats: chats with opened pictures and clips.
    """
    # Keyed by object: questions about one video share its frames.
    digests: dict[int, str] = {}

    def content(part: dict[str, Any]) -> str:
        kind = part["type"]
        if kind == "text":
            return str(part["text"])
        medium = part[kind]
        if id(medium) not in digests:
            digests[id(medium)] = _digest(medium)
        return digests[id(medium)]

    return [
        _hashed(
            json.dumps(
                [
                    [turn["role"], [[part["type"], content(part)] for part in turn["content"]]]
                    for turn in chat
                ]
            ).encode()
        )
        for chat in chats
    ]


def _digest(medium: Any) -> str:
    """Return a digest of a picture's pixels, or of a clip's frames and times."""
    if isinstance(medium, Clip):
        header = (medium.frames.shape, medium.timestamps, medium.fps, medium.duration)
        return _hashed(repr(header).encode(), medium.frames.tobytes())
    return _hashed(repr((medium.mode, medium.size)).encode(), medium.tobytes())


def _hashed(*pieces: bytes) -> str:
    state = hashlib.blake2b(digest_size=6)
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()
