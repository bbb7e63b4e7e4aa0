"""HunyuanOCR: pictures of any size, newlines, positions on four axes."""

from __future__ import annotations

from dataclasses import replace

from tests.families.qwen import IMAGES, PIXELS
from tests.tiny import IMAGE, TEXT, Family, tiny_spec

ARCHITECTURE = {
    "text": {
        "max_position_embeddings": 4096,
        "rope_parameters": {
            **{"rope_type": "dynamic", "rope_theta": 1.0e4, "alpha": 1000.0, "factor": 1.0},
            "mrope_section": [2, 2, 2, 2],
        },
    },
    "vision": {
        **{"patch_size": 7, "spatial_merge_size": 2, "out_hidden_size": 32},
        **{"max_image_size": 4 * IMAGE},
    },
    "model": {"tie_word_embeddings": True},
}

FAMILIES = {
    "hunyuan_ocr": Family(
        tiny_spec(
            "hunyuan_ocr",
            text=replace(TEXT, head_dim=16),
            projector=(128, 32),
            class_attention="mean",
            rotary_axes=4,
            processor=PIXELS,
            architecture=ARCHITECTURE,
        ),
        IMAGES,
    )
}
