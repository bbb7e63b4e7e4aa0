"""MiniCPM-V 4.6: a picture and its slices, tokens joined inside the tower, layers of linear attention."""

from __future__ import annotations

from dataclasses import replace

from tests.families.qwen import LINEAR, QWEN35, STATES
from tests.tiny import IMAGE, TOWER, Family, chat, picture, tiny_spec

ROPE = {
    name: value
    for name, value in QWEN35.architecture["text"]["rope_parameters"].items()
    if not name.startswith("mrope")
}
SPEC = tiny_spec(
    "minicpm_v",
    text=QWEN35.facts.text,
    stem=TOWER,
    tower=replace(TOWER, layers=3),
    projector=(128, 128, 32),
    stem_joins=4,
    class_attention="mean",
    processor={"max_slice_nums": 4, "scale_resolution": 84},
    architecture={
        "text": {"rope_parameters": ROPE},
        "vision": {"image_size": 2 * IMAGE, "patch_size": 7},
        "model": {"tie_word_embeddings": False},
    },
)

#: 2x4 tokens; 2x4 and two slices of 3x3 side by side, then 3x3; 4x2 and two slices of 3x3, one above the other.
CHATS = (
    chat("w1 w2 w3", picture(0, 100, 70)),
    chat("w4", picture(1, 168, 84), picture(2, 84, 84)),
    chat("w5 w6 w7 w8 w9", picture(3, 90, 200)),
)

FAMILIES = {"minicpm_v": Family(SPEC, CHATS, most=LINEAR, states=STATES)}
