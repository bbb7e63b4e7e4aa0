"""DeepSeek-OCR in a mode without crops and in one with crops, and batches of cropped and uncropped images."""

from __future__ import annotations

from typing import Any

from espalier.harness.specs.run_spec import ModelSpec
from tests.tiny import DEPTH, Family, StackFacts, chat, picture, tiny_spec

#: As many key heads as heads: eager attention of this class takes no other. 2 of 4 experts of width 12, one shared.
TEXT = StackFacts(DEPTH, 32, 36, 4, 4, 8, gated=True, causal=True, first_intermediate=48, experts=4)
STEM = StackFacts(2, 24, 48, 4, 4, 6, gated=False, causal=False, window_layers=1)


def small(patch: int = 4, **processor: Any) -> ModelSpec:
    """A spec whose views of S pixels have S / (4 patch) cells along an edge."""
    return tiny_spec(
        "deepseek_ocr",
        text=TEXT,
        stem=STEM,
        projector=(64, 32),
        processor=processor,
        architecture={
            "text": {
                "max_position_embeddings": 4096,
                "moe_intermediate_size": 12,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
            },
            "vision": {"image_size": 8, "patch_size": 2},
            "stem": {
                "image_size": 16 * patch,
                "patch_size": patch,
                "output_channels": 8,
                "downsample_channels": [16, 32],
                "window_size": 3,
                "global_attn_indexes": [1],
                "initializer_range": 0.02,
            },
            # The grouped kernel of real runs has no double precision.
            "model": {"experts_implementation": "eager"},
        },
    )


def modes(side: int, crop: int | None = None, largest: int = 6) -> dict[str, Any]:
    """Settings of a mode: edge of the whole view, edge of a crop or None, most crops."""
    return {
        "size": {"height": side, "width": side},
        "tile_size": crop or side,
        "crop_to_patches": crop is not None,
        "max_patches": largest,
    }


PLAIN = small(**modes(48))
GUNDAM = small(**modes(48, 32, 4))

FAMILIES = {
    "deepseek_ocr": Family(
        PLAIN,
        (
            chat("w1 w2 w3", picture(0, 50, 40)),
            chat("w4", picture(1, 28, 56), picture(2, 60, 30)),
            chat("w5 w6 w7 w8 w9", picture(3, 56, 25)),
        ),
    ),
    # Two crops; none, and three; none.
    "deepseek_ocr_gundam": Family(
        GUNDAM,
        (
            chat("w1 w2 w3", picture(0, 64, 36)),
            chat("w4", picture(1, 28, 30), picture(2, 30, 90)),
            chat("w5 w6 w7 w8 w9", picture(3, 32, 25)),
        ),
    ),
}
