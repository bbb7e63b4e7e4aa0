"""Answers of the engine's own loop are those of the library's: every family, batch, setting and kind of shortening."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from espalier.harness.cost.budget import Budget
from espalier.harness.engine import generation_loop as loop
from espalier.harness.engine import kv_cache as attention
from espalier.harness.engine import kv_cache as cache
from espalier.harness.engine.eviction import CacheBudget
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.session import Session
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import DecodeLoop
from espalier.methods.none import NoReduction
from lab.bench.step_copies import written
from tests.engine.test_decode import Turns
from tests.families import FAMILIES
from tests.family_runs import Tiny, generation
from tests.tiny import Scatter

STEPS = 9
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": STEPS, "output_logits": True}
SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "temperature": 1.5, "top_p": 0.95}
#: One row, one row reduced between layers, and three padded ones.
ROWS: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (
    *(((1,), ()), ((1,), ("prefix", 2))),
    *(((0, 1, 2), ()), ((0, 1, 2), ("prefix", 3)), ((0, 1, 2), ("vision", 1, 3))),
)


def generated(
    adapter: Adapter,
    inputs: Any,
    decode: DecodeLoop,
    settings: dict[str, Any],
    method: Any = None,
    **session: Any,
) -> GeneratedBatch:
    torch.manual_seed(3)
    with Session(
        adapter, method or NoReduction(), Budget("kept", 0.5), decode=decode, timed=False, **session
    ) as opened:
        return opened.generate(inputs, **settings)


def check(
    adapter: Adapter, inputs: Any, settings: dict[str, Any], **session: Any
) -> GeneratedBatch:
    """Compare the loop with the library's, and return its answer."""
    settings = {"suppress_tokens": list(adapter.items(inputs)), **settings}
    ours = generated(adapter, inputs, "loop", settings, **session)
    wanted = generated(adapter, inputs, "generate", settings, **session)
    assert {record.loop for record in ours.records} == {"loop"}
    assert {record.loop for record in wanted.records} == {"generate"}
    assert torch.equal(ours.ids, wanted.ids)
    assert (ours.logits is None) == (wanted.logits is None)
    if ours.logits is not None and wanted.logits is not None:
        assert ours.logits.shape == wanted.logits.shape
        span = wanted.logits[wanted.logits.isfinite()].abs().max()
        ruled = wanted.logits.isinf()
        assert torch.equal(ruled, ours.logits.isinf())
        assert (ours.logits - wanted.logits)[~ruled].abs().max() < 1e-5 * span
    assert ours.cache_lengths == wanted.cache_lengths
    for loop_record, expected_record in zip(ours.records, wanted.records, strict=True):
        assert loop_record.kv_bytes == expected_record.kv_bytes > 0
        assert loop_record.new_tokens == expected_record.new_tokens
        assert loop_record.attended == expected_record.attended
    return ours


@pytest.mark.sampled(102)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_alone_and_padded(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "STEP", 3)  # an answer outgrows it, and its masks, more than once
    monkeypatch.setattr(attention, "ROOM", 4)
    tiny = Tiny(name, dtype)
    for rows, where in ROWS:
        check(tiny.adapter, tiny.inputs(*rows), GREEDY, method=Scatter(where) if where else None)
    check(tiny.adapter, tiny.inputs(), SAMPLED, method=Scatter((2,)))


def ends(adapter: Adapter, inputs: Any, settings: dict[str, Any]) -> list[int]:
    """Two tokens in the middle of the batch's answers, so that its rows end at different positions."""
    settings = {"suppress_tokens": list(adapter.items(inputs)), **settings}
    ids = generated(adapter, inputs, "generate", settings).ids
    return [int(ids[0, 3]), int(ids[1, 5])]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.8},
    "no repeated words": {"no_repeat_ngram_size": 2},
    "at least": {"min_new_tokens": 6},
    "cut": {"top_k": 5},
    "kept in": {"begin_suppress_tokens": [5, 7], "bad_words_ids": [[9], [11, 12]]},
    "short": {"max_new_tokens": 1},
    "a limit of all": {"max_new_tokens": None, "max_length": 216},
    "no logits": {"output_logits": False},
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("lazy", [1, 4])
@pytest.mark.parametrize("label", SETTINGS)
@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_settings_and_several_ends(
    tiny: Tiny, label: str, base: dict[str, Any], lazy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "interval", lambda device: lazy)
    adapter, inputs = tiny.adapter, tiny.inputs()
    settings = {**base, **SETTINGS[label]}
    if base is GREEDY:
        settings.pop("top_k", None)
    check(adapter, inputs, settings)
    if label != "short":
        eos = ends(adapter, inputs, settings)
        check(adapter, inputs, {**settings, "eos_token_id": eos, "pad_token_id": 0})
        check(adapter, inputs, {**settings, "eos_token_id": eos[0]})


@pytest.mark.parametrize("lazy", [1, 4, 50])
def test_what_is_said_behind_the_last_end_is_cut(
    tiny: Tiny, lazy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "interval", lambda device: lazy)
    settings = {**SAMPLED, "suppress_tokens": list(tiny.adapter.items(tiny.inputs(1)))}
    plain = generated(tiny.adapter, tiny.inputs(1), "generate", settings).ids[0].tolist()
    end = next(n for n in range(1, STEPS) if plain[n] not in plain[:n])
    ours = check(tiny.adapter, tiny.inputs(1), {**settings, "eos_token_id": plain[end]})
    assert ours.ids[0].tolist() == plain[: end + 1]


@pytest.mark.parametrize("lazy", [1, 4])
def test_stop_strings(tiny: Tiny, lazy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "interval", lambda device: lazy)
    adapter, inputs = tiny.adapter, tiny.inputs()
    tokenizer = adapter.processor.tokenizer
    plain = generated(adapter, inputs, "generate", GREEDY).ids
    strings = [word for word in tokenizer.batch_decode(plain[:, 3:4]) if word.strip()]
    assert strings, "the test needs an answer that can be written"
    check(adapter, inputs, {**GREEDY, "stop_strings": strings, "tokenizer": tokenizer})
    single = check(
        adapter, tiny.inputs(0), {**GREEDY, "stop_strings": strings, "tokenizer": tokenizer}
    )
    assert single.ids.shape[1] < STEPS


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("name", ["llava", "onevision_video"])
def test_closed_gaps_hidden_tokens_and_chosen_entries(name: str, rows: tuple[int, ...]) -> None:
    tiny = Tiny(name)
    adapter, inputs = tiny.adapter, tiny.inputs(*rows)
    for where in ((2,), ("prefix", 3), ("vision", 1)):
        check(adapter, inputs, GREEDY, method=Scatter(where), positions="renumbered")
        check(adapter, inputs, GREEDY, method=Scatter(where), backend="emulate")
        check(adapter, inputs, GREEDY, method=Turns(where))
        check(adapter, inputs, GREEDY, method=Turns(where), backend="emulate")
    combined = {"positions": "renumbered", "backend": "emulate"}
    check(adapter, inputs, GREEDY, method=Scatter(("prefix", 2)), **combined)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("rows", [(1,), (0, 1, 2)])
@pytest.mark.parametrize(
    ("method", "params"),
    [("snapkv", {}), ("aircache", {"per_head": True}), ("h2o", {"allocation": "strength"})],
)
def test_evicted_caches(method: str, params: dict[str, Any], rows: tuple[int, ...]) -> None:
    for name in ("llava", "qwen2_5_vl"):
        tiny = Tiny(name)
        evicting = CacheBudget(build_method(method, params), 0.6)
        check(tiny.adapter, tiny.inputs(*rows), GREEDY, evicting=evicting)
        check(tiny.adapter, tiny.inputs(*rows), GREEDY, evicting=evicting, method=Scatter((2,)))


# Of padding rows the library's own eager attention makes NaN in fp64.
@pytest.mark.parametrize(("dtype", "batches"), [("float64", ROWS[:2]), ("float32", ROWS[2:])])
def test_eager_attention_takes_the_same_loop(dtype: str, batches: Any) -> None:
    tiny = Tiny("llava", dtype, "eager")
    for rows, where in batches:
        check(tiny.adapter, tiny.inputs(*rows), GREEDY, method=Scatter(where) if where else None)


def test_beams_and_asked_for_scores_are_the_librarys(tiny: Tiny) -> None:
    for settings in ({"num_beams": 2}, {"output_scores": True}):
        ours = generated(tiny.adapter, tiny.inputs(), "loop", {**GREEDY, **settings})
        wanted = generated(tiny.adapter, tiny.inputs(), "generate", {**GREEDY, **settings})
        assert {record.loop for record in ours.records} == {"generate"}
        assert torch.equal(ours.ids, wanted.ids)


def test_one_race_is_what_the_library_draws_by() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, words in ((1, 7), (3, 288), (4, 32_000)):
        probabilities = (torch.randn(rows, words, generator=generator) * 3).softmax(-1)
        torch.manual_seed(rows)
        wanted = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        after = torch.rand(())
        torch.manual_seed(rows)
        assert torch.equal(loop.draw_ids(probabilities), wanted)
        assert torch.equal(torch.rand(()), after)


def test_processors_that_leave_nothing_to_draw_are_an_error(tiny: Tiny) -> None:
    def nothing(ids: Any, scores: Any) -> Any:
        return torch.full_like(scores, float("-inf"))

    settings = {**SAMPLED, "logits_processor": LogitsProcessorList([nothing])}
    with pytest.raises(RuntimeError, match="left none with a probability"):
        generated(tiny.adapter, tiny.inputs(), "loop", settings)


def test_the_model_is_as_it_was(tiny: Tiny) -> None:

    def hooks() -> int:
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in tiny.adapter.model.modules()
        )

    before = hooks()
    check(tiny.adapter, tiny.inputs(), generation(tiny.adapter, tiny.inputs()))
    assert hooks() == before
    assert tiny.adapter.decoder.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_no_step_writes_as_much_as_a_layer_of_the_cache_holds() -> None:
    tiny = Tiny("llava", "float32")
    for rows, where, backend in (
        *(((1,), (), "drop"), ((0, 1, 2), (), "drop")),
        *(((0, 1, 2), ("prefix", 3), "drop"), ((0, 1, 2), (2,), "emulate")),
    ):
        inputs = tiny.inputs(*rows)
        layer = len(inputs["input_ids"]) * 2 * 8 * 4  # bytes of the keys of one token: 2 heads of 8
        for decode in ("loop", "generate"):
            with written(tiny.adapter.decoder) as writes:
                method = Scatter(where) if where else None
                ours = generated(
                    tiny.adapter, inputs, decode, GREEDY, method=method, backend=backend
                )
            shortest = layer * min(ours.cache_lengths)
            _, first, *later, _ = [size for size, _ in writes.steps]  # the last: the whole answer
            if decode == "loop":
                assert max(later) < shortest / 2, writes.steps
            # Not vacuous: the cache moves to roomier storage in the first step.
            assert first > layer * max(ours.cache_lengths)
