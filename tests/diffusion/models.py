"""A tiny model that denoises: LLaVA's architecture with a text stack in which every token sees every other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.models.adapter import Adapter
from tests.tiny import TEXT, clip_architecture, load_tiny, save_tiny, tiny_spec

MASK, END = 280, 2
DIFFUSION = DiffusionFacts(MASK, (END,), forbidden_ids=(0, 1, 3), prefix_cache=True)
SPEC = tiny_spec(
    "llava",
    text=replace(TEXT, causal=False),
    diffusion=DIFFUSION,
    architecture=clip_architecture(image_seq_length=16),
)


def save(folder: Path) -> Path:
    return save_tiny(SPEC, folder)


def load(
    folder: Path, dtype: str = "float64", attention: str = "sdpa", shifted: bool = False
) -> Adapter:
    """The tiny model; `shifted`: with positions that predict the next token."""
    facts = replace(SPEC.facts, diffusion=replace(DIFFUSION, shifted=shifted))
    return load_tiny(replace(SPEC, facts=facts), folder, dtype, attention)
