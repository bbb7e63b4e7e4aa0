"""A tiny DiffusionGemma, with a window shorter than its prompts and a canvas of 8 places."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from espalier.harness.cost.facts import CanvasFacts, WideFacts
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.run_spec import ModelSpec
from tests.tiny import TEXT, TOWER, Family, chat, load_tiny, picture, save_tiny, tiny_spec

CANVAS = 8
WINDOW = 28

SPEC = tiny_spec(
    "diffusion_gemma",
    text=replace(
        TEXT, intermediate=48 + 2 * 16, experts=4, window_layers=2, wide=WideFacts(2, 1, 16)
    ),
    tower=replace(TOWER, gated=True),
    projector=(32, 32),
    class_attention="mean",
    architecture={
        "text": {
            "moe_intermediate_size": 16,
            "top_k_experts": 2,
            "sliding_window": WINDOW,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 30.0,
        },
        "vision": {
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
            "standardize": True,
        },
        "model": {"tie_word_embeddings": True},
    },
)
SPEC = replace(SPEC, facts=replace(SPEC.facts, canvas=CanvasFacts(CANVAS, 48), visual_tokens=70))

#: Three rows that need left padding: a wide picture, two, a high one.
CHATS = (
    chat("w1 w2 w3", picture(0, 60, 20)),
    chat("w4", picture(1, 28, 28), picture(2, 20, 60)),
    chat("w5 w6 w7 w8 w9", picture(3, 30, 50)),
)

#: Its tests are not those of answers that are generated token by token.
FAMILIES: dict[str, Family] = {}
CANVASES = {"diffusion_gemma": Family(SPEC, CHATS)}


@cache
def folder() -> TemporaryDirectory[str]:
    """A folder that lives as long as the process."""
    return TemporaryDirectory(prefix="espalier-canvas-")


@cache
def saved(layers: int = SPEC.facts.text.layers) -> Path:
    """The folder of a tiny checkpoint with so many layers."""
    return save_tiny(deep(layers), Path(folder().name) / str(layers))


def deep(layers: int) -> ModelSpec:
    return replace(SPEC, facts=SPEC.facts.scaled(layers, None))


@cache
def loaded(dtype: str = "float64", layers: int = SPEC.facts.text.layers) -> Adapter:
    return load_tiny(deep(layers), saved(layers), dtype)
