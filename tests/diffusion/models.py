"""A tiny model that denoises: LLaVA's architecture with a text stack in which every token sees every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.decoding.diffusion.denoising_loop import DenoisingGenerator
from espalier.harness.engine.denoising_steps import DenoisingSession
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.models.adapter import Adapter
from espalier.methods.base import TokenReducer
from espalier.methods.none import NoReduction
from tests.tiny import CHATS, TEXT, clip_architecture, load_tiny, save_tiny, tiny_spec

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


def denoised(
    adapter: Adapter,
    method: TokenReducer | None = None,
    ratio: float = 0.0,
    chats: Sequence[list[dict]] = CHATS,
    every: Sequence[list[dict]] = CHATS,
    budget: Budget | None = None,
    **how: Any,
) -> GeneratedBatch:
    """Whole answers to chats; a sample's name is the place of its chat among `every`, whatever its batch.

    Args:
        how: settings of the session by their names, and of the generation.
    """
    names = ("backend", "positions", "separators", "seed")
    options = {name: how.pop(name) for name in names if name in how}
    method, budget = method or NoReduction(), budget or Budget("kept", ratio)
    with DenoisingSession(adapter, method, budget, **options) as session:
        denoiser = DenoisingGenerator(session, adapter)
        samples = [str(every.index(chat)) for chat in chats]
        return denoiser.generate(adapter.encode(list(chats)), samples, **how)
