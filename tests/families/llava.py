"""LLaVA-1.5 and LLaVA-NeXT."""

from __future__ import annotations

from tests.tiny import CHATS, LLAVA, SHAPES, Family, clip_architecture, tiny_spec

PINPOINTS = [[28, 56], [56, 28], [56, 56]]

FAMILIES = {
    "llava": Family(LLAVA, tuple(CHATS)),
    "llava_next": Family(
        tiny_spec("llava_next", architecture=clip_architecture(image_grid_pinpoints=PINPOINTS)),
        tuple(SHAPES),
    ),
}
