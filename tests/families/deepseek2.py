"""DeepSeek-OCR 2: views of 144 queries, which the class's tables fix, and a picture with two crops."""

from __future__ import annotations

from dataclasses import replace

from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.models.deepseek_ocr2 import DeepseekOcr2Adapter
from tests.families.deepseek import STEM, TEXT, modes
from tests.tiny import Family, StackFacts, chat, picture, tiny_spec

#: 12 x 12 cells of 4 x 4 patches, in windows: over all of them, attention would take most of a test.
SIDE = 96
SPEC = tiny_spec(
    "deepseek_ocr2",
    text=TEXT,
    stem=replace(STEM, window_layers=2),
    tower=StackFacts(2, 32, 48, 4, 2, 8, gated=True, causal=True),
    projector=(32, 32),
    class_attention="mean",
    processor=modes(SIDE, SIDE, 2),
    architecture={
        "text": {
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 12,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
        },
        "stem": {
            **{"image_size": SIDE, "patch_size": 2, "window_size": 8, "output_channels": 8},
            **{"downsample_channels": [16, 32], "global_attn_indexes": []},
            "initializer_range": 0.02,
        },
        # The grouped kernel of real runs has no double precision.
        "model": {"experts_implementation": "eager"},
    },
)
SPEC = replace(
    SPEC,
    facts=replace(SPEC.facts, signals=frozenset(SIGNALS) - set(DeepseekOcr2Adapter.data.lacking)),
)

FAMILIES = {
    "deepseek_ocr2": Family(
        SPEC,
        (
            chat("w1 w2 w3", picture(0, 50, 40)),
            chat("w4", picture(1, 28, 100), picture(2, 60, 30)),
            chat("w5 w6 w7 w8 w9", picture(3, 56, 25)),
        ),
    )
}
