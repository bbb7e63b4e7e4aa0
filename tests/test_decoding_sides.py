"""Loaded models on the state machine: lossless for every way of decoding, and a cache that never moves."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from harness.budget import Budget
from harness.decoding.drafts import Draft
from harness.decoding.machine import Machine
from harness.decoding.rules import Greedy
from harness.decoding.sides import GreedySide
from harness.decoding.transports import Sequential
from harness.engine.session import Session
from methods.base import TokenReducer
from methods.none import NoReduction
from methods.uniform import Uniform
from tests.families import FAMILIES
from tests.tiny import load_tiny, save_tiny

NAMES = ("llava", "qwen2_5_vl", "internvl")
LIMIT, ROOM = 24, 40


@cache
def in_doubles(name: str):
    """A tiny model of a family in fp64, where a window and single steps give the same ids."""
    spec = FAMILIES[name].spec
    with TemporaryDirectory() as folder:
        adapter = load_tiny(spec, save_tiny(spec, Path(folder)))
    adapter.model.double()
    return adapter


def side(name: str, method: TokenReducer | None = None, ratio: float = 0.0, chat: int = 0):
    adapter = in_doubles(name)
    inputs = adapter.encode([list(FAMILIES[name].chats)[chat]])
    with Session(adapter, method or NoReduction(), Budget("kept", ratio), timed=False) as session:
        return GreedySide(session, inputs, ROOM)


@cache
def plain(name: str, chat: int = 0) -> list[int]:
    """What transformers' own greedy decoding says."""
    adapter = in_doubles(name)
    inputs = adapter.encode([list(FAMILIES[name].chats)[chat]])
    with torch.inference_mode():
        ids = adapter.model.generate(
            **inputs, max_new_tokens=LIMIT, min_new_tokens=LIMIT, do_sample=False
        )
    found: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_target_alone_is_plain_greedy_decoding(name: str) -> None:
    machine = Machine(None, side(name), Greedy(), Sequential())
    assert machine.run(LIMIT).tokens == plain(name)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("gamma", [1, 2, 5, 9])
@pytest.mark.parametrize(
    ("method", "ratio"),
    [(NoReduction(), 0.0), (Uniform(), 0.5), (Uniform(), 0.9), (Uniform(layer=2), 0.9)],
    ids=["whole", "half", "tenth", "ragged"],
)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_with_fewer_visual_tokens_change_nothing(name, method, ratio, gamma, overlap):
    drafter, verifier = side(name, method, ratio), side(name)
    trace = Machine(drafter, verifier, Greedy(), Sequential(), gamma, overlap).run(LIMIT)
    assert trace.tokens == plain(name)
    if ratio == 0:
        assert trace.acceptance == 1


def test_short_sighted_drafts_are_refused_now_and_then() -> None:
    """Or the tests above would say little."""
    rollbacks = 0
    for name in NAMES:
        drafter, verifier = side(name, Uniform(), 0.9), side(name)
        rollbacks += (
            Machine(drafter, verifier, Greedy(), Sequential(), 3, True).run(LIMIT).rollbacks
        )
    assert rollbacks > 1


def test_any_answer_may_be_asked_for_in_any_order() -> None:
    """Going back and forth gives the rows of a side that is asked only once."""
    used = side("llava")
    answers = ([3, 4, 5, 6], [3, 4], [3, 9, 9], [], [3, 4, 5, 7, 8], [2])
    for answer in answers:
        for split in range(len(answer) + 1):
            rows = used.rows(answer[:split], Draft(tuple(answer[split:])))
            fresh = side("llava").rows(answer[:split], Draft(tuple(answer[split:])))
            assert [int(row) for row in rows] == [int(row) for row in fresh]


def test_no_step_moves_the_cache_and_going_back_only_cuts() -> None:
    one = side("llava")
    layers = one._cache.layers
    before = [layer.keys.untyped_storage().data_ptr() for layer in layers]
    prompt = one._cache.lengths
    one.draft([], 7)
    assert one._cache.lengths == tuple(length + 6 for length in prompt)
    one.rows([5], Draft(()))
    assert one._cache.lengths == tuple(length + 1 for length in prompt)
    assert [layer.keys.untyped_storage().data_ptr() for layer in layers] == before
    with pytest.raises(RuntimeError, match="room"):
        one.rows([1] * (ROOM + 1), Draft(()))


def test_several_chats_are_refused() -> None:
    adapter = in_doubles("llava")
    inputs = adapter.encode(list(FAMILIES["llava"].chats)[:2])
    with (
        Session(adapter, NoReduction(), Budget("kept", 0.0)) as session,
        pytest.raises(ValueError, match="one"),
    ):
        GreedySide(session, inputs, ROOM)
