"""Gemma 3, with a window shorter than its prompts."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.tiny import CHATS, DEPTH, IMAGE, TEXT, Family, tiny_spec

#: Sliding layers look back 12 positions; a picture has 16 tokens of 2 x 2 patches.
WINDOW = 12
PATTERN = 2
TYPES = [
    "sliding_attention" if (layer + 1) % PATTERN else "full_attention" for layer in range(DEPTH)
]

ARCHITECTURE = {
    "text": {
        "query_pre_attn_scalar": TEXT.head_dim,
        "sliding_window": WINDOW,
        "sliding_window_pattern": PATTERN,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "vision": {"image_size": 2 * IMAGE, "patch_size": 7, "vision_use_head": False},
    "model": {"mm_tokens_per_image": 16, "tie_word_embeddings": True},
}


def sees(visual: torch.Tensor, layer: int) -> torch.Tensor:
    """Return (L, L): tokens see those up to themselves and their whole picture, if less than a window back."""
    place = torch.arange(len(visual))
    first_text = (~visual).long().cumsum(0)  # equal inside a picture
    together = (first_text[:, None] == first_text) & visual[:, None] & visual
    seen = (place <= place[:, None]) | together
    if TYPES[layer] == "sliding_attention":
        seen &= place[:, None] - place < WINDOW
    return seen


FAMILIES = {
    "gemma3": Family(
        tiny_spec(
            "gemma3",
            architecture=ARCHITECTURE,
            text=replace(TEXT, window_layers=3),
            projector=(32, 32),
            class_attention="mean",
        ),
        tuple(CHATS),
        sees,
        tuple(WINDOW - 1 if "sliding" in name else float("inf") for name in TYPES),
    )
}
