"""LLaVA-OneVision-1.5: class tokens in a tower of packed pictures and frames, positions on one axis."""

from __future__ import annotations

from dataclasses import replace

from tests.families.qwen import IMAGES, MIXED, QWEN2, ROPE, VIDEOS, VISION
from tests.tiny import TEXT, Family

SPEC = replace(
    QWEN2,
    adapter="llava_onevision1_5",
    # Heads of another width than the hidden states have for each.
    facts=replace(
        QWEN2.facts,
        text=replace(TEXT, head_dim=16),
        class_attention="token",
        rotary_axes=1,
    ),
    architecture={
        "text": {
            "head_dim": 16,
            "rope_parameters": {key: ROPE[key] for key in ("rope_type", "rope_theta")},
        },
        "vision": {**VISION, "temporal_patch_size": 1},
    },
)

FAMILIES = {
    "llava_onevision1_5": Family(SPEC, IMAGES),
    "llava_onevision1_5_video": Family(SPEC, VIDEOS),
    "llava_onevision1_5_mixed": Family(SPEC, MIXED),
}
