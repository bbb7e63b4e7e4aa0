"""Loaded models on the state machine: lossless for every way of decoding, and a cache that never moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.drafts import Draft, Greedy
from espalier.harness.decoding.speculative.samplers import limit_of, resolved_config
from espalier.harness.decoding.speculative.state_machine import Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport
from espalier.harness.engine import text_stack as stack
from espalier.harness.engine.model_parts import ends_of
from espalier.harness.engine.session import Session
from espalier.harness.engine.text_stack import text_only_prefill
from espalier.methods.base import TokenReducer
from espalier.methods.none import NoReduction
from espalier.methods.uniform import Uniform
from tests.decoding.models import (
    LIMIT,
    NAMES,
    ROOM,
    encoded,
    in_doubles,
    known_side,
    plain,
    running,
    side,
)
from tests.families import FAMILIES

WAYS: dict[str, tuple[TokenReducer | None, float]] = {
    "whole": (None, 0.0),
    "half": (Uniform(), 0.5),
    "tenth": (Uniform(), 0.9),
    "hundredth": (Uniform(), 0.99),
}
RAGGED = Uniform(layer=2), 0.9


def decode(drafter, name: str, gamma: int, overlap: bool, limit: int = LIMIT, ends=()):
    machine = Machine(
        drafter, known_side(name), Greedy(), SequentialTransport(), gamma, overlap, ends
    )
    return machine.run(limit)


@pytest.mark.parametrize("name", [*NAMES, "internvl_phi3", "deepseek_ocr"])
def test_the_target_alone_is_plain_greedy_decoding(name: str) -> None:
    assert decode(None, name, 1, False).tokens == plain(name)


@pytest.mark.sampled(84)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("gamma", range(1, 10))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_with_fewer_visual_tokens_change_nothing(name, way, gamma, overlap) -> None:
    method, ratio = WAYS[way]
    trace = decode(known_side(name, method, ratio), name, gamma, overlap)
    assert trace.tokens == plain(name)
    if ratio == 0:
        assert trace.acceptance == 1


@pytest.mark.parametrize("gamma", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_layers_may_hold_prompts_of_different_lengths(name: str, gamma: int) -> None:
    drafter = known_side(name, *RAGGED)
    assert decode(drafter, name, gamma, True).tokens == plain(name)
    assert len(set(drafter.cache.lengths)) == 2


def test_short_sighted_drafts_are_refused_now_and_then() -> None:
    """Or the tests above would say little."""
    for name in NAMES:
        trace = decode(known_side(name, Uniform(), 0.9), name, 3, True)
        assert trace.rollbacks > 0
        assert trace.acceptance is not None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_that_is_always_wrong_costs_only_time(name: str, overlap: bool) -> None:
    class Wrong:
        def draft(self, tokens: Sequence[int], count: int) -> Draft:
            right = plain(name, limit=LIMIT + count)
            here = len(tokens)
            return Draft(tuple((token + 1) % 100 for token in right[here : here + count]))

    trace = decode(Wrong(), name, 4, overlap)
    assert trace.tokens == plain(name)
    assert trace.acceptance == 0


@pytest.mark.sampled(18)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("gamma", [3, 9])
@pytest.mark.parametrize("name", NAMES)
def test_answers_end_where_generate_ends_them(name: str, gamma: int, overlap: bool) -> None:
    """At an end token inside a window, and at a limit inside a window."""
    answer = plain(name)
    place = next(n for n in range(2, LIMIT) if answer[n] not in answer[:n])
    end = answer[place]
    short = plain(name, eos_token_id=end)
    assert short == answer[: place + 1]
    config = resolved_config(in_doubles(name), {"max_new_tokens": 4, "eos_token_id": end})
    assert (ends_of(config), limit_of(config)) == ((end,), 4)
    for method, ratio in (WAYS["whole"], WAYS["tenth"]):
        drafter = known_side(name, method, ratio)
        assert decode(drafter, name, gamma, overlap, LIMIT, ends_of(config)).tokens == short
        assert decode(drafter, name, gamma, overlap, limit_of(config)).tokens == answer[:4]


@pytest.mark.parametrize("name", [*NAMES, "deepseek_ocr"])
def test_a_draft_without_images_is_a_prompt_of_words(name: str, monkeypatch) -> None:
    """No placeholder, newline or separator is left, no tower runs, and decoding stays the target's."""
    adapter, inputs, answer = in_doubles(name), encoded(name), plain(name)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the tower ran")

    monkeypatch.setattr(adapter.tower, "forward", refuse)
    blind = side(name, prefill=lambda a, i: lambda cache: text_only_prefill(a, i, cache))
    blind.start()
    layout = adapter.layout(inputs)
    placeholders = set(adapter.items(inputs))
    words = [token for token in inputs["input_ids"][0].tolist() if token not in placeholders]
    assert 0 < len(words) < layout.text[0] + layout.counts[0]
    assert set(blind.cache.lengths) == {len(words)}
    assert blind.stack.following.flatten().tolist() == [len(words)] * adapter.facts.rotary_axes
    with torch.inference_mode():
        expected = adapter.model(input_ids=torch.tensor([words])).logits[0, -1]
    torch.testing.assert_close(blind.first, expected)
    monkeypatch.undo()  # the target has its tower
    assert decode(blind, name, 4, True).tokens == answer


def test_any_answer_may_be_asked_for_in_any_order() -> None:
    """Going back and forth gives the rows of a side that is asked only once."""
    used = side("llava")
    answers = ([3, 4, 5, 6], [3, 4], [3, 9, 9], [], [3, 4, 5, 7, 8], [2])
    for answer in answers:
        for split in range(len(answer) + 1):
            rows = used.rows(answer[:split], Draft(tuple(answer[split:])))
            assert rows == side("llava").rows(answer[:split], Draft(tuple(answer[split:])))
            assert all(type(row) is int for row in rows)


def test_nothing_is_fed_twice(monkeypatch) -> None:
    """Windows, refusals and new drafts cost one pass of each new token, on both sides."""
    fed: dict[str, list[int]] = {"draft": [], "target": []}
    sides = {"draft": side("llava", Uniform(), 0.9), "target": side("llava")}
    for which, model_side in sides.items():
        run = model_side.stack.run

        def watched(ids, places, seen=None, run=run, which=which):
            fed[which].append(len(places))
            return run(ids, places, seen)

        monkeypatch.setattr(model_side.stack, "run", watched)
    machine = Machine(sides["draft"], sides["target"], Greedy(), SequentialTransport(), 4, False)
    trace = machine.run(LIMIT)
    assert trace.tokens == plain("llava")
    assert fed["target"] == [4] + [5] * (len(trace.rounds) - 1)
    catching_up = [1 + (model_side.accepted == 4) for model_side in trace.rounds[:-1]]
    assert fed["draft"] == [1] * 3 + [n for late in catching_up for n in (late, 1, 1, 1)]


def test_no_step_moves_the_cache_and_going_back_only_cuts() -> None:
    model_side = side("llava")
    model_side.start()
    layers = model_side.cache.layers
    before = [layer.keys.untyped_storage().data_ptr() for layer in layers]
    prompt = model_side.cache.lengths
    model_side.draft([], 7)
    assert model_side.cache.lengths == tuple(length + 6 for length in prompt)
    model_side.rows([5], Draft(()))
    assert model_side.cache.lengths == tuple(length + 1 for length in prompt)
    assert [layer.keys.untyped_storage().data_ptr() for layer in layers] == before
    with pytest.raises(RuntimeError, match="room"):
        model_side.rows([1] * (ROOM + 1), Draft(()))


class Waits(TorchDispatchMode):
    """Counts single numbers that are fetched from the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_greedy_drafts_and_rows_fetch_their_ids_once(monkeypatch) -> None:
    model_side = side("llava")
    model_side.start()
    transfers: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(self: torch.Tensor):
        transfers.append(self.numel())
        return tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    with Waits() as waits:
        draft = model_side.draft([], 5)
        assert transfers == [5]
        model_side.rows([*draft.tokens, 7], Draft((8, 9)))
        # Three ids, and whether all logits are finite.
        assert transfers == [5, 4]
    assert waits.count == 0


def test_the_prompt_runs_when_it_is_first_asked_and_once() -> None:
    calls: list[int] = []

    def counting(adapter, inputs):
        def prefill(cache):
            calls.append(1)
            return running(adapter, inputs, NoReduction(), 0.0)(cache)

        return prefill

    model_side = side("llava", prefill=counting)
    assert calls == []
    model_side.rows([], Draft(()))
    model_side.start()
    model_side.draft([1], 2)
    assert calls == [1]


@contextmanager
def unfolded(configs: object) -> Iterator[bool]:
    yield False


def test_attention_that_builds_its_own_masks_takes_windows_too(monkeypatch) -> None:
    monkeypatch.setattr(stack, "fold_heads", unfolded)
    target = side("llava", attention="eager")
    for drafter in (side("llava", attention="eager"), side("llava", *RAGGED)):
        trace = Machine(drafter, target, Greedy(), SequentialTransport(), 4, True).run(LIMIT)
        assert trace.tokens == plain("llava")
        missing = drafter.rows([1, 2, 3], Draft((4, 5)))
        assert missing == [drafter.rows([1, 2, 3, 4, 5][:n], Draft(()))[0] for n in (3, 4, 5)]


def test_several_chats_are_refused() -> None:
    adapter = in_doubles("llava")
    inputs = adapter.encode(list(FAMILIES["llava"].chats)[:2])
    with pytest.raises(ValueError, match="one"):
        text_only_prefill(adapter, inputs, side("llava").cache)
    with (
        Session(adapter, NoReduction(), Budget("kept", 0.0)) as session,
        pytest.raises(ValueError, match="one"),
    ):
        session.prefill(inputs, side("llava").cache)


def test_a_row_of_another_answer_is_not_taken_for_one_of_adopted_tokens() -> None:
    adopting, source = (side("llava", do_sample=True) for _ in range(2))
    stale = adopting.rows([5, 9, 9], Draft(()))[0]
    wanted = source.rows([5, 6, 7], Draft(()))[0]
    assert not torch.allclose(stale, wanted)
    adopting.cut(1)
    adopting.adopt([5, 6, 7], source)
    torch.testing.assert_close(adopting.rows([5, 6, 7], Draft(()))[0], wanted)
