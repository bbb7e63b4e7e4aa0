"""Ordinary answers in the engine's indexed cache: bit-identical to those with the library's cache, for every batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache

from espalier.harness.cost.budget import Budget
from espalier.harness.engine import kv_cache as cache
from espalier.harness.engine.kv_cache import IndexedLayer
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.session import Session
from espalier.harness.models.adapter import Adapter
from tests.families import FAMILIES
from tests.family_runs import Tiny
from tests.tiny import Scatter

GREEDY = {"do_sample": False, "max_new_tokens": 7, "output_logits": True}


@contextmanager
def librarys_cache(adapter: Adapter) -> Iterator[None]:
    """Let `generate` make its own cache."""
    model: Any = adapter.model
    generate = model.generate

    def without(**arguments: Any) -> Any:
        assert isinstance(arguments.pop("past_key_values"), Cache)
        return generate(**arguments)

    model.__dict__["generate"] = without
    try:
        yield
    finally:
        del model.__dict__["generate"]


def answer(adapter: Adapter, inputs: Any, where: tuple, **changes: Any) -> GeneratedBatch:
    with Session(adapter, Scatter(where), Budget("kept", 0.5), timed=False) as session:
        return session.generate(inputs, **GREEDY, **changes)


@pytest.mark.sampled(108)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_logits_and_bytes_are_those_of_the_librarys_cache(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "STEP", 3)  # an answer outgrows it twice
    tiny = Tiny(name, dtype)
    for rows, where, changes in (
        ((), (), {}),
        ((1,), (2,), {}),
        ((), ("prefix", 3), {"num_beams": 3}),
        ((2,), (), {"num_beams": 2}),
    ):
        inputs = tiny.inputs(*rows)
        ours = answer(tiny.adapter, inputs, where, **changes)
        with librarys_cache(tiny.adapter):
            wanted = answer(tiny.adapter, inputs, where, **changes)
        assert torch.equal(ours.ids, wanted.ids)
        assert torch.equal(ours.logits, wanted.logits)
        assert ours.cache_lengths == wanted.cache_lengths
        for record, expected_record in zip(ours.records, wanted.records, strict=True):
            # The library's windows are views of the prompt's storage.
            whole = name != "gemma3"
            assert record.kv_bytes == expected_record.kv_bytes > 0 or not whole
            assert record.kv_bytes <= expected_record.kv_bytes
            assert record.kv_entries == expected_record.kv_entries


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_layer_moves_when_it_is_full_and_not_at_every_token() -> None:
    layer = IndexedLayer(room=0, step=4)
    states = [drawn(2, 3, count, 8) for count in (5, 1, 1, 1, 1, 1, 1)]
    places = []
    for part in states:
        keys, values = layer.update(part, -part)
        places.append(keys.data_ptr())
    assert torch.equal(keys, torch.cat(states, 2))
    assert torch.equal(values, -torch.cat(states, 2))
    assert len(set(places)) == 3  # the prompt's, then every five tokens


def test_beams_change_places() -> None:
    layer = IndexedLayer(room=0, step=4)
    layer.update(drawn(3, 2, 5, 8), drawn(3, 2, 5, 8))
    layer.update(drawn(3, 2, 1, 8), drawn(3, 2, 1, 8))
    before = layer.entries[0].clone()
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(layer.entries[0], before[[2, 0, 0]])
    assert torch.equal(layer.keys, before[[2, 0, 0]])


def test_a_layer_that_may_not_move_is_full() -> None:
    layer = IndexedLayer(room=1)
    layer.update(drawn(1, 2, 5, 8), drawn(1, 2, 5, 8))
    layer.update(drawn(1, 2, 1, 8), drawn(1, 2, 1, 8))
    with pytest.raises(RuntimeError, match="room for 6 tokens, got 7"):
        layer.update(drawn(1, 2, 1, 8), drawn(1, 2, 1, 8))
