"""Tiny models of the real families as sides, prefilled once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.cached_model import CachedModel, Prefill, SparseDrafter
from espalier.harness.decoding.speculative.drafts import RandomNumbers
from espalier.harness.decoding.speculative.samplers import resolved_config, sampler_of
from espalier.harness.engine.session import Session
from espalier.harness.engine.text_stack import Graphs
from espalier.harness.models.adapter import Adapter
from espalier.methods.base import TokenReducer
from espalier.methods.none import NoReduction
from tests.families import FAMILIES
from tests.tiny import load_tiny, save_tiny

NAMES = ("llava", "qwen2_5_vl", "qwen3_vl", "internvl")
LIMIT, ROOM = 6, 40


@cache
def in_doubles(name: str, attention: str = "sdpa") -> Adapter:
    """A tiny model of a family in fp64, where a window and single steps give the same ids."""
    spec = FAMILIES[name].spec
    with TemporaryDirectory() as folder:
        adapter = load_tiny(spec, save_tiny(spec, Path(folder)), attention=attention)
    adapter.model.double()
    return adapter


@cache
def encoded(name: str) -> dict[str, Any]:
    return in_doubles(name).encode([FAMILIES[name].chats[0]])


@cache
def plain(name: str, limit: int = LIMIT, **settings: Any) -> list[int]:
    """What transformers' own greedy decoding says."""
    adapter, inputs = in_doubles(name), encoded(name)
    with torch.inference_mode():
        ids = adapter.model.generate(**inputs, max_new_tokens=limit, do_sample=False, **settings)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def running(
    adapter: Adapter, inputs: dict[str, Any], method: TokenReducer, ratio: float
) -> Prefill:
    """A prefill by the engine."""

    def prefill(into: Any) -> tuple[Tensor, Tensor]:
        with Session(adapter, method, Budget("kept", ratio), timed=False) as session:
            return session.prefill(inputs, into)

    return prefill


def fed_counts(stack: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list to which each pass through a stack from now on adds its number of tokens."""
    counts: list[int] = []
    run = stack.run

    def watched(ids: Any, places: Any, seen: Any = None) -> Any:
        counts.append(len(places))
        return run(ids, places, seen)

    monkeypatch.setattr(stack, "run", watched)
    return counts


def side(
    name: str,
    method: TokenReducer | None = None,
    ratio: float = 0.0,
    *,
    prefill: Callable[[Adapter, dict[str, Any]], Prefill] | None = None,
    attention: str = "sdpa",
    adapter: Adapter | None = None,
    common: int | None = None,
    numbers: RandomNumbers | None = None,
    room: int = ROOM,
    graphs: Graphs | None = None,
    **settings: Any,
) -> CachedModel:
    """A fresh side of the family's tiny model or of another one."""
    adapter, inputs = adapter or in_doubles(name, attention), encoded(name)
    config = resolved_config(adapter, {"max_new_tokens": LIMIT, "do_sample": False, **settings})
    sampler = sampler_of(adapter, config, inputs["input_ids"], common, numbers)
    run = running(adapter, inputs, method or NoReduction(), ratio)
    return CachedModel(adapter, sampler, room, prefill(adapter, inputs) if prefill else run, graphs)


@cache
def known_side(name: str, method: TokenReducer | None = None, ratio: float = 0.0) -> CachedModel:
    """A side that other tests have asked before."""
    return side(name, method, ratio)


def some(name: str, ratio: float) -> Tensor:
    """Visual tokens (layers, K) that are kept, others in every layer."""
    adapter = in_doubles(name)
    count = adapter.layout(encoded(name)).counts[0]
    keep = max(1, round(count * (1 - ratio)))
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randperm(count, generator=generator)[:keep].sort().values
        for _ in adapter.decoder.layers
    ]
    return torch.stack(rows)


def sparse(name: str, target: CachedModel, ratio: float) -> SparseDrafter:
    visual = in_doubles(name).layout(encoded(name)).visual[0]
    return SparseDrafter(target, some(name, ratio), visual)
