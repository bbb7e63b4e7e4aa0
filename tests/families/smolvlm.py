"""SmolVLM2."""

from __future__ import annotations

from tests.tiny import IMAGE, SHAPES, Family, tiny_spec

#: A tower of 4 x 4 patches, which pixel shuffle turns into 2 x 2 units.
ARCHITECTURE = {
    "text": {"max_position_embeddings": 4096},
    "vision": {"image_size": IMAGE, "patch_size": 7},
    "model": {"scale_factor": 2, "tie_word_embeddings": False},
}

FAMILIES = {
    "smolvlm": Family(
        tiny_spec(
            "smolvlm", architecture=ARCHITECTURE, projector=(128, 32), class_attention="mean"
        ),
        tuple(SHAPES),
    )
}
