"""Processors, warpers and sampling: the output of generate(), position by position, and its distribution."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from espalier.harness.decoding.speculative.draft_model import TreeDrafter
from espalier.harness.decoding.speculative.drafts import Draft, Greedy, RandomNumbers, Sampling
from espalier.harness.decoding.speculative.samplers import (
    limit_of,
    resolved_config,
    rule_of,
    sampler_of,
)
from espalier.harness.decoding.speculative.state_machine import Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport
from espalier.harness.engine.model_parts import ends_of
from espalier.harness.errors import UserError
from espalier.methods.uniform import Uniform
from tests.decoding.models import LIMIT, NAMES, encoded, in_doubles, known_side, plain, side

PENALTIES = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 9]]},
    {"forced_eos_token_id": 11},
]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", PENALTIES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_processors_hear_prompt_and_answer(name: str, settings: dict, overlap: bool) -> None:
    adapter, inputs = in_doubles(name), encoded(name)
    with torch.inference_mode():
        ids = adapter.model.generate(**inputs, max_new_tokens=LIMIT, do_sample=False, **settings)
    expected = ids[0, inputs["input_ids"].shape[1] :].tolist()
    drafter, target = side(name, Uniform(), 0.5, **settings), side(name, **settings)
    trace = Machine(drafter, target, Greedy(), SequentialTransport(), 3, overlap).run(LIMIT)
    assert trace.tokens == expected
    perfect = Machine(
        side(name, **settings), target, Greedy(), SequentialTransport(), 3, overlap
    ).run(LIMIT)
    assert (perfect.tokens, perfect.acceptance) == (expected, 1)


def test_the_processors_make_a_difference() -> None:
    """Or the test above would say little."""
    free = plain("llava")
    assert plain("llava", repetition_penalty=1.3) != free
    assert plain("llava", no_repeat_ngram_size=3) != free
    assert plain("llava", forced_eos_token_id=11) != free


def test_an_answer_may_be_told_to_go_on_behind_its_end() -> None:
    """min_new_tokens forbids the end, so the whole answer behind it is another one."""
    answer = plain("llava")
    end = next(answer[n] for n in range(2, LIMIT) if answer[n] not in answer[:n])
    settings = {"eos_token_id": end, "min_new_tokens": LIMIT - 1}
    expected = plain("llava", **settings)
    assert expected != answer
    drafter, target = side("llava", Uniform(), 0.9, **settings), side("llava", **settings)
    trace = Machine(drafter, target, Greedy(), SequentialTransport(), 4, True, (end,)).run(LIMIT)
    assert trace.tokens == expected


def test_settings_of_the_checkpoint_count_and_travel(monkeypatch) -> None:
    """They come from the target, by pickle, and override a draft's own settings."""
    target, draft = in_doubles("llava"), in_doubles("internvl")
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", 1.3)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [3, 4])
    config = pickle.loads(pickle.dumps(resolved_config(target, {"max_new_tokens": 9})))
    assert (ends_of(config), limit_of(config)) == ((3, 4), 9)
    prompt = encoded("llava")["input_ids"]
    names = [
        [type(step).__name__ for step in sampler_of(adapter, config, prompt).processors]
        for adapter in (target, draft)
    ]
    assert names == [["RepetitionPenaltyLogitsProcessor"]] * 2
    assert isinstance(rule_of(config, RandomNumbers(0)), Greedy)


def test_a_sampler_leaves_the_settings_as_they_are() -> None:
    adapter = in_doubles("llava")
    config = resolved_config(adapter, {"max_new_tokens": 9, "min_new_tokens": 2})
    before = config.to_dict()
    sampler_of(adapter, config, encoded("llava")["input_ids"])
    assert config.to_dict() == before


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.9}


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_sampled_rows_are_generates(name: str, more: dict) -> None:
    adapter, inputs = in_doubles(name), encoded(name)
    settings = {**SAMPLED, **more}
    torch.manual_seed(3)
    with torch.inference_mode():
        generated = adapter.model.generate(
            **inputs,
            **settings,
            max_new_tokens=LIMIT,
            output_scores=True,
            return_dict_in_generate=True,
        )
    answer = generated.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    expected = torch.cat(generated.scores).softmax(-1)
    step = side(name, **settings)
    window = step.rows(answer[:2], Draft(tuple(answer[2:-1])))
    torch.testing.assert_close(torch.stack(window), expected[2:], rtol=1e-5, atol=1e-7)
    start = side(name, **settings).rows([], Draft(()))
    torch.testing.assert_close(start[0], expected[0], rtol=1e-5, atol=1e-7)


def test_a_sampling_draft_draws_by_position_and_says_from_what() -> None:
    model_side = side("llava", Uniform(), 0.5, numbers=RandomNumbers(11), **SAMPLED)
    draft = model_side.draft([4, 5], 4)
    rows = side("llava", Uniform(), 0.5, **SAMPLED).rows([4, 5], Draft(draft.tokens[:-1]))
    torch.testing.assert_close(torch.stack(list(draft.rows)), torch.stack(rows))
    rule = Sampling(RandomNumbers(11))
    drawn = [rule.draw(row, 2 + place, "draft") for place, row in enumerate(rows)]
    assert list(draft.tokens) == drawn
    assert model_side.draft([4, 5], 4).tokens == draft.tokens
    with pytest.raises(ValueError, match="numbers"):
        side("llava", **SAMPLED).draft([], 1)


# ------------------------------------------------------------------ distribution


def test_ids_that_the_other_side_lacks_are_never_said() -> None:
    """A draft with a wider vocabulary says only what both know; greedy, sampled and in trees."""
    (free,) = known_side("llava").rows([], Draft(()))
    bound = side("llava", common=free)
    assert max(bound.draft([], 6).tokens) < free
    assert bound.draft([], 1).tokens[0] == int(bound.first[:free].argmax())
    tree = TreeDrafter(bound, (-1,) * 5).draft([], 1).tokens
    assert list(tree) == bound.first[:free].topk(5).indices.tolist()
    (row,) = side("llava", common=free, do_sample=True).rows([], Draft(()))
    assert row.shape == (free,)
    assert float(row.sum()) == pytest.approx(1)


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 3}, "generation.num_beams=3"),
        ({"stop_strings": ["a"]}, "generation.stop_strings"),
        ({"max_time": 2.0}, "generation.max_time=2.0"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "generation.penalty_alpha=0.6"),
        ({"output_logits": True}, "generation.output_logits=True"),
        ({"output_attentions": True}, "generation.output_attentions=True"),
        ({"prompt_lookup_num_tokens": 3}, "generation.prompt_lookup_num_tokens=3"),
        ({"num_return_sequences": 2}, "generation.num_return_sequences=2"),
        ({"use_cache": False}, "generation.use_cache=False"),
        ({"guidance_scale": 1.5}, "generation.guidance_scale=1.5"),
        ({"watermarking_config": {"bias": 2.0}}, "generation.watermarking_config"),
        ({"temperatur": 0.5}, "generation.temperatur=0.5"),
        ({"max_new_tokens": 0}, "max_new_tokens': 0} is refused"),
        ({"max_new_tokens": None}, "generation.max_new_tokens=None"),
    ],
)
def test_what_the_loop_cannot_honour_is_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        resolved_config(in_doubles("llava"), {"max_new_tokens": 4, **settings})


def test_a_setting_of_the_checkpoint_is_refused_too(monkeypatch) -> None:
    adapter = in_doubles("llava")
    monkeypatch.setattr(adapter.model.generation_config, "num_beams", 4)
    with pytest.raises(UserError, match="num_beams=4"):
        resolved_config(adapter, {"max_new_tokens": 4})
    assert resolved_config(adapter, {"max_new_tokens": 4, "num_beams": 1}).num_beams == 1


def test_rows_of_the_wrong_kind_are_an_error() -> None:
    with pytest.raises(TypeError, match="probabilities"):
        Sampling(RandomNumbers(0)).choose(3, 0)
