"""A stored prompt is equivalent to its inputs: the same answers, logits and records, for any method at any time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.engine.session import Session, shared_prompt
from espalier.harness.errors import UserError
from espalier.harness.specs.catalogue import build_method
from espalier.methods.base import MethodError, Need, Site, TokenReducer
from tests.families import FAMILIES
from tests.family_runs import HALF, ROWS, Tiny, generation
from tests.tiny import Recorder, Scatter, chat

#: Methods that start from a prompt: no reduction, scores inside the decoder, choices before it by states and at random.
SHARING = ("none", "fastv", "divprune", "random")
PLACES = (("vision",), ("prefix",), (0,), (2,), (1, 3))


def method_of(name: str) -> TokenReducer:
    return build_method(name, {})


def answered(
    tiny: Tiny, method: TokenReducer, start: Any, *rows: int, **changes: Any
) -> GeneratedBatch:
    settings = {key: changes.pop(key) for key in ("backend", "positions") if key in changes}
    samples = [f"s{row}" for row in rows or ROWS]
    arguments = generation(tiny.adapter, tiny.inputs(*rows), **{"max_new_tokens": 3, **changes})
    with Session(tiny.adapter, method, HALF, seed=3, **settings) as session:
        return session.generate(start, samples, **arguments)


def same(actual: GeneratedBatch, expected: GeneratedBatch) -> bool:
    """Return whether two batches have bit-identical answers."""
    logits = (actual.logits is None) == (expected.logits is None)
    if actual.logits is not None and expected.logits is not None:
        logits = torch.equal(actual.logits, expected.logits)
    origins = zip(actual.records, expected.records, strict=True)
    return (
        torch.equal(actual.ids, expected.ids)
        and logits
        and actual.cache_lengths == expected.cache_lengths
        and [untimed(record) for record in actual.records]
        == [untimed(record) for record in expected.records]
        and all(equal(a.origin, b.origin) for a, b in origins)
    )


def untimed(record: SampleRecord) -> SampleRecord:
    return replace(record, times_ms={}, shared=())


def equal(actual: Tensor | None, expected: Tensor | None) -> bool:
    return actual is not None and expected is not None and torch.equal(actual, expected)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_methods_that_share_a_prompt_answer_as_from_the_inputs(name: str) -> None:
    """Rows of unequal numbers of images, videos and words, in one batch and as single rows; one method runs twice."""
    tiny = Tiny(name, "float32")
    methods = [method_of(label) for label in SHARING]
    for rows in (ROWS, (1,)):
        inputs = tiny.inputs(*rows)
        prompt = shared_prompt(tiny.adapter, inputs, methods)
        expected = [answered(tiny, method, inputs, *rows) for method in methods]
        for method, result in zip((*methods, methods[1]), (*expected, expected[1]), strict=True):
            assert same(answered(tiny, method, prompt, *rows), result)


@pytest.mark.sampled(48)
@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "drop") for name in FAMILIES), ("qwen2_5_vl_mixed", "emulate")]
)
def test_every_place_behind_the_tower_starts_from_one_prompt(name: str, backend: str) -> None:
    """Includes features that are merged and projected again."""
    tiny = Tiny(name)
    methods = [Scatter(place, True) for place in PLACES]
    prompt = shared_prompt(tiny.adapter, tiny.inputs(), methods)
    for method in methods:
        expected = answered(tiny, method, tiny.inputs(), backend=backend)
        assert same(answered(tiny, method, prompt, backend=backend), expected)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_beams_start_from_a_prompt(name: str) -> None:
    tiny, beams = Tiny(name), {"num_beams": 3, "output_logits": False}
    methods = [Scatter(("vision",)), Scatter((2,))]
    prompt = shared_prompt(tiny.adapter, tiny.inputs(), methods)
    for method in methods:
        expected = answered(tiny, method, tiny.inputs(), **beams)
        assert same(answered(tiny, method, prompt, **beams), expected)


def stored(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a layer of a cache holds: keys and values, or the states of linear attention."""
    if hasattr(layer, "keys"):
        return layer.keys, layer.values
    return layer.conv_states[0], layer.recurrent_states[0]


# Sliding layers need the engine's masks at every step (tests/models/test_gemma3.py).
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3"])
def test_a_decoding_loop_of_ones_own_starts_from_a_prompt(name: str) -> None:
    tiny = Tiny(name)
    inputs, method = tiny.inputs(1), method_of("fastv")
    with Session(tiny.adapter, method, HALF) as session:
        prompt = session.prompt(inputs)
        runs = []
        for start in (inputs, prompt):
            cache = DynamicCache(config=tiny.adapter.decoder.config)
            runs.append((session.prefilled(start, cache), cache))
    (first, cache), (second, second_cache) = runs
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.next, second.next)
    for layers in zip(cache.layers, second_cache.layers, strict=True):
        for mine, yours in zip(*map(stored, layers), strict=True):
            assert torch.equal(mine, yours)
    ids = torch.zeros(1, 1, dtype=torch.long)
    assert same(first.finish(ids), second.finish(ids))


@pytest.mark.parametrize("name", ["llava", "onevision_image", "internvl", "qwen2_5_vl_mixed"])
def test_what_the_tower_says_is_kept_for_those_who_ask(name: str) -> None:
    """Values of class token, keys and states; extra tower layers, run only for the method, are counted as usual."""
    tiny = Tiny(name)
    signals = ("cls_attention", "tower_keys", "tower_states", "projected")
    method = Recorder((Site("prefix"), Site("layer", 2)), tuple(map(Need, signals)))
    logits_reader = Recorder((Site("prefix"),), (Need("cls_logits"),))
    inputs = tiny.inputs()
    prompt = shared_prompt(tiny.adapter, inputs, [method, logits_reader])
    for reader in (method, logits_reader):
        expected = answered(tiny, reader, inputs)
        views = [*reader.views]
        reader.views.clear()
        assert same(answered(tiny, reader, prompt), expected)
        for before, after in zip(views, reader.views, strict=True):
            assert before.signals.keys() == after.signals.keys()
            for key, value in before.signals.items():
                assert torch.equal(value, after.signals[key]), key


def test_pixels_are_read_for_those_who_ask(tiny: Tiny) -> None:
    method = Recorder((Site("prefix"),), (Need("luma"),))
    with Session(tiny.adapter, method, HALF) as session:
        prompt = session.prompt(tiny.inputs())
    assert same(answered(tiny, method, prompt), answered(tiny, method, tiny.inputs()))
    ours, theirs = method.views[: len(method.views) // 2], method.views[len(method.views) // 2 :]
    for ours_view, their_view in zip(ours, theirs, strict=True):
        assert torch.equal(ours_view.signals["luma"], their_view.signals["luma"])


@pytest.mark.parametrize("positions", ["renumbered", "method"])
def test_closed_gaps_start_from_a_prompt(positions: str) -> None:
    tiny = Tiny("llava_next")
    prompt = shared_prompt(tiny.adapter, tiny.inputs())
    for name in ("divprune", "fastv"):
        expected = answered(tiny, method_of(name), tiny.inputs(), positions=positions)
        assert same(answered(tiny, method_of(name), prompt, positions=positions), expected)


def test_the_tower_runs_once_and_its_time_is_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, runs = Tiny("llava"), []
    handle = tiny.adapter.tower.register_forward_hook(lambda *_: runs.append(1))
    try:
        prompt = shared_prompt(tiny.adapter, tiny.inputs())
        batches = [answered(tiny, method_of(name), prompt) for name in SHARING]
    finally:
        handle.remove()
    assert len(runs) == 1
    assert prompt.times_ms["vision"] > 0
    assert not [name for name in prompt.inputs if "pixel" in name]
    for record in (row_record for each in batches for row_record in each.records):
        assert (record.times_ms["vision"], record.shared) == (0, ("vision",))
    single = answered(tiny, method_of("none"), tiny.inputs())
    assert single.records[0].shared == ()
    assert single.records[0].times_ms["vision"] > 0


def test_nobody_changes_a_prompt_and_the_model_is_left_as_it_was(tiny: Tiny) -> None:
    hooks = [len(module._forward_pre_hooks) for module in tiny.adapter.model.modules()]
    prompt = shared_prompt(tiny.adapter, tiny.inputs(), [Scatter(("vision",), True)])
    before = {name: value for name, value in prompt.arguments.items() if isinstance(value, Tensor)}
    copies = {name: value.clone() for name, value in before.items()}
    for place in PLACES:
        answered(tiny, Scatter(place, True), prompt)
    assert all(torch.equal(before[name], copies[name]) for name in copies)
    assert hooks == [len(module._forward_pre_hooks) for module in tiny.adapter.model.modules()]
    assert {"inputs_embeds", "position_ids", "attention_mask"} <= before.keys()


def test_what_a_family_hands_to_its_text_stack_beside_the_words_is_kept(tiny: Tiny) -> None:
    """Without pixels the model has no such argument; beams would need a row for each sample."""
    prompt = shared_prompt(tiny.adapter, tiny.inputs())
    embeddings, levels = prompt.arguments["inputs_embeds"], [torch.ones(4, 32)]
    kept = replace(prompt, arguments={**prompt.arguments, "levels": levels})
    call = {"inputs_embeds": torch.zeros_like(embeddings), "use_cache": True, "levels": None}
    entered = kept.enter({**call, "position_ids": "the call's own"})
    assert entered["levels"] is levels
    assert entered["inputs_embeds"] is embeddings
    assert (entered["use_cache"], entered["position_ids"]) == (True, "the call's own")
    beams = {**call, "inputs_embeds": torch.zeros(2 * len(embeddings), *embeddings.shape[1:])}
    with pytest.raises(
        UserError, match=r"^generation\.num_beams=2: a prompt cannot repeat the levels"
    ):
        kept.enter(beams)


def test_a_prompt_without_pictures(tiny: Tiny) -> None:
    inputs = tiny.adapter.encode([chat("w1 w2"), chat("w3 w4 w5")])
    method = Recorder((Site("vision"),), (Need("cls_attention"),))
    prompt = shared_prompt(tiny.adapter, inputs, [method])
    with Session(tiny.adapter, method, HALF) as session:
        settings = generation(tiny.adapter, inputs)
        assert same(session.generate(prompt, **settings), session.generate(inputs, **settings))


def refused(tiny: Tiny, method: TokenReducer, prompt: Prompt) -> str:
    with pytest.raises((MethodError, UserError)) as caught:
        answered(tiny, method, prompt)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_prompt_does_not_hold_is_refused(tiny: Tiny) -> None:
    bare = shared_prompt(tiny.adapter, tiny.inputs())
    assert "inside the vision tower" in refused(tiny, method_of("tome"), bare)
    assert "tower features" in refused(tiny, Scatter(("vision",)), bare)
    message = refused(tiny, method_of("fastervlm"), bare)
    assert "cls_attention" in message
    assert "stored: nothing" in message
    assert "another model" in refused(Tiny("llava", "float32"), method_of("none"), bare)
    with pytest.raises(MethodError, match="inside the vision tower"):
        shared_prompt(tiny.adapter, tiny.inputs(), [method_of("none"), method_of("tome")])
    with (
        Session(tiny.adapter, method_of("tome"), HALF) as session,
        pytest.raises(MethodError, match="inside the vision tower"),
    ):
        session.prompt(tiny.inputs())
    with pytest.raises(RuntimeError, match=r"Session\.prompt was called outside"):
        Session(tiny.adapter, method_of("none"), HALF).prompt(tiny.inputs())
