"""Chats about held-out clips for benchmarks of speculative decoding."""

from __future__ import annotations

from typing import Any

from espalier.harness.seedling.video.clip_benchmarks import in_memory
from espalier.harness.seedling.video.clips import DrawnClip

#: The first clip of the caption benchmark.
FIRST_CLIP = 6_000_000


def clip_chat(clip: DrawnClip, question: str) -> list[dict[str, Any]]:
    """Return a chat with a clip and a question."""
    video = {"type": "video", "video": in_memory(clip)}
    return [{"role": "user", "content": [video, {"type": "text", "text": question}]}]
