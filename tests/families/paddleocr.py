"""PaddleOCR-VL: pictures of any size, patches in raster order, positions on three axes."""

from __future__ import annotations

from dataclasses import replace

from tests.families.qwen import IMAGES, PIXELS, ROPE
from tests.tiny import IMAGE, TEXT, Family, tiny_spec

#: Heads wider than their share of the states, as in the release.
ARCHITECTURE = {
    "text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "vision": {"image_size": IMAGE, "patch_size": 7, "spatial_merge_size": 2},
    "model": {"tie_word_embeddings": False},
}

FAMILIES = {
    "paddleocr_vl": Family(
        tiny_spec(
            "paddleocr_vl",
            text=replace(TEXT, head_dim=16),
            projector=(128, 128, 32),
            class_attention="mean",
            rotary_axes=3,
            processor=PIXELS,
            architecture=ARCHITECTURE,
        ),
        IMAGES,
    )
}
