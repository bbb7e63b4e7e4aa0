"""Sample data in the journal, for error analysis: plain values of bounded size, references to media."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from PIL import Image

from espalier.harness.media.frames import Clip

#: Largest number of characters of a text, and of entries of a list or table, that is kept.
TEXT, ENTRIES = 4000, 200

#: Hexadecimal digits of the hash of a picture or of frames.
DIGITS = 16


def json_value(value: Any) -> Any:
    """Return a JSON value: long texts and lists are cut, other objects become the name of their type."""
    match value:
        case None | bool():
            return value
        case str():
            suffix = f"… ({len(value)} characters)" if len(value) > TEXT else ""
            return value[:TEXT] + suffix
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(float(value)) else str(float(value))
        case Mapping():
            return {str(key): json_value(item) for key, item in list(value.items())[:ENTRIES]}
        case list() | tuple():
            return [json_value(item) for item in value[:ENTRIES]]
        case set() | frozenset():
            return sorted(map(str, value))[:ENTRIES]
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    return f"<{type(value).__name__}>"


def question(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of a chat as the model's template gets them, with a mark for each picture and video."""
    text = "\n".join(f"{_role_mark(message)}{_text_of(message['content'])}" for message in messages)
    return str(json_value(text))


def media(messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Return a reference for each picture and video of a chat, never its pixels.

    Args:
        messages: the chat, as the adapter gets it.
        source: data set, split and document; the position in the chat is added.

    Cost: one hash over the pixels of a picture or of frames in memory; of a video file only path and size are read.
    """
    references = []
    for place, (kind, value) in enumerate(_media(messages)):
        references.append({"from": f"{source}#{place}", "kind": kind, **_described(value)})
    return references


def _role_mark(message: Mapping[str, Any]) -> str:
    return "" if message["role"] == "user" else f"[{message['role']}] "


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content
    )


def _media(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for message in messages:
        for part in message["content"] if not isinstance(message["content"], str) else ():
            if part["type"] != "text":
                yield part["type"], part.get(part["type"], part.get("url"))


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, Image.Image):
        digest = hashlib.sha256(value.tobytes()).hexdigest()[:DIGITS]
        return {"size": list(value.size), "sha256": digest}
    if isinstance(value, str | Path):
        file = Path(value)
        return {"path": str(value), "bytes": file.stat().st_size if file.is_file() else None}
    if isinstance(value, Clip):
        digest = hashlib.sha256(value.frames.tobytes()).hexdigest()[:DIGITS]
        return {"shape": list(value.frames.shape), "sha256": digest}
    return {"is": type(value).__name__}
