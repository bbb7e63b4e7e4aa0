"""Answers under the full model: one pass over a padded batch says what one forward for each token alone gives."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.engine.session import Session
from espalier.harness.evaluation.evaluate import evaluate
from espalier.harness.evaluation.samples import Sample
from espalier.harness.kinds.rescore import Rescored, acceptance, judge
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import build_method
from espalier.harness.store import Journal
from run import main
from tests import commands
from tests.families import FAMILIES
from tests.family_runs import Tiny, extended, positions
from tests.tiny import VOCABULARY, Scatter

END = 2
LENGTHS = (5, 1, 3)
NAMES = list(FAMILIES)
GREEDY = {"do_sample": False, "max_new_tokens": 8}


@torch.inference_mode()
def by_prefix(adapter, inputs, answer, processor):
    """The slow reference: an uncached forward for each prefix of one answer, its last logits alone."""
    judgements = []
    for place, token in enumerate(answer.tolist()):
        longer = extended(inputs, answer[None, :place])
        logits = adapter.model(
            **longer, position_ids=positions(adapter, longer), use_cache=False
        ).logits[:, -1]
        scores = processor(longer["input_ids"], logits.float())[0]
        best = int(scores.argmax())
        gap = float(scores[best] - scores[token])
        judgements.append((best == token, float(scores.softmax(0)[token]), gap))
    return judgements


def answers(adapter, inputs, likely):
    """Answers of unequal lengths, the second only the end token; no placeholders.

    Every other token is one of the model's own, so that some stand and others do not.
    """
    holders = set(adapter.items(inputs))
    generator = torch.Generator().manual_seed(5)
    ids = torch.full((3, max(LENGTHS)), END)
    for row, length in enumerate(LENGTHS):
        for place in range(length - 1):
            draw = int(torch.randint(VOCABULARY, (1,), generator=generator))
            ids[row, place] = likely[row, place] if place % 2 == 0 else draw
            while int(ids[row, place]) in holders:
                ids[row, place] += 1
    return ids


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_is_judged_like_every_prefix_alone(name):
    tiny, adapter = Tiny(name), Tiny(name).adapter
    inputs = tiny.inputs()
    penalty = 1.4
    settings = {**GREEDY, "repetition_penalty": penalty}
    holders = list(adapter.items(inputs))
    with torch.inference_mode():
        likely = adapter.model.generate(**inputs, **settings, suppress_tokens=holders)
    ids = answers(adapter, inputs, likely[:, inputs["input_ids"].shape[1] :])
    judged = judge(adapter, inputs, ids, **settings)
    processor = RepetitionPenaltyLogitsProcessor(penalty=penalty)
    stood = []
    for row, length in enumerate(LENGTHS):
        expected = by_prefix(adapter, tiny.inputs(row), ids[row, :length], processor)
        for place, (stands, chance, gap) in enumerate(expected):
            assert bool(judged.stands[row, place]) == stands
            assert float(judged.chance[row, place]) == pytest.approx(chance, rel=1e-4, abs=1e-9)
            assert float(judged.gap[row, place]) == pytest.approx(gap, rel=1e-5, abs=1e-4)
            stood.append(stands)
    assert any(stood)
    assert not all(stood)
    assert torch.equal(judge(adapter, inputs, ids[:, :1], **settings).chance, judged.chance[:, :1])
    # What fills the answers up behind their end is nobody's business.
    other = ids.clone()
    for row, length in enumerate(LENGTHS):
        other[row, length:] = 7
    assert judge(adapter, inputs, other, **settings).accepted(LENGTHS) == judged.accepted(LENGTHS)


class Forced(LogitsProcessor):
    """Makes `generate` give certain answers, and keeps the scores it would have chosen from."""

    def __init__(self, ids):
        self.ids, self.seen = ids, []

    def __call__(self, input_ids, scores):
        place = len(self.seen)
        self.seen.append(scores.clone())
        return torch.full_like(scores, -math.inf).scatter(1, self.ids[:, place : place + 1], 0.0)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", NAMES)
def test_placeholders_in_an_answer_stand_for_no_image(name):
    """Decoding goes on behind such a token, and so does the judgement."""
    adapter, inputs = Tiny(name).adapter, Tiny(name).inputs()
    ids = torch.randint(3, 250, (3, 4), generator=torch.Generator().manual_seed(1))
    ids[:, 1] = next(iter(adapter.items(inputs)))
    forced = Forced(ids)
    with torch.inference_mode():
        adapter.model.generate(
            **inputs, do_sample=False, max_new_tokens=4, logits_processor=[forced]
        )
    judged = judge(adapter, inputs, ids, **GREEDY)
    for place, scores in enumerate(forced.seen):
        chance = scores.softmax(1).gather(1, ids[:, place : place + 1])[:, 0]
        assert torch.allclose(judged.chance[:, place], chance, rtol=1e-4, atol=1e-9)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", NAMES)
def test_the_session_is_undisturbed_and_the_judge_is_unreduced(name):
    tiny = Tiny(name, "float32")
    adapter, inputs = tiny.adapter, tiny.inputs()
    for where in (("vision",), (1, 3)):
        with Session(adapter, Scatter(where), Budget("kept", 0.6)) as session:
            plain = session.generate(inputs, **GREEDY, output_logits=True)
            rescored = Rescored(adapter, session)
            first = rescored.generate(inputs, **GREEDY)
            second = rescored.generate(inputs, **GREEDY)
        assert torch.equal(first.ids, plain.ids)
        outside = judge(adapter, inputs, plain.ids, **GREEDY)
        expected = outside.accepted([record.new_tokens for record in plain.records])
        for judged in (first, second):
            assert [record.accepted for record in judged.records] == expected
            for record, other in zip(judged.records, plain.records, strict=True):
                assert (record.kept, record.entering) == (other.kept, other.entering)
                assert record.times_ms["rescore"] > 0
                assert set(record.times_ms) == set(other.times_ms) | {"rescore"}
        chances = plain.logits.softmax(-1).gather(2, plain.ids.unsqueeze(2)).squeeze(2)
        assert (chances - outside.chance).abs().max() > 1e-5  # the reduced model differs


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", NAMES)
def test_the_full_model_accepts_itself(name):
    """Beams are judged as a whole too, and sampled answers by what the settings leave of the distribution."""
    adapter, inputs = Tiny(name).adapter, Tiny(name).inputs()
    settings = {**GREEDY, "suppress_tokens": list(adapter.items(inputs))}
    with Session(adapter, build_method("none", {}), Budget("kept", 0.0)) as session:
        rescored = Rescored(adapter, session)
        for record in rescored.generate(inputs, **settings).records:
            assert record.accepted["greedy"] == record.new_tokens == 8
            assert record.accepted["first_refusal"] is record.accepted["gap"] is None
            assert 0 < record.accepted["sampling"] < record.new_tokens
        for record in rescored.generate(inputs, **settings, num_beams=2).records:
            assert 0 < record.accepted["sampling"] < record.new_tokens
        only = {**settings, "do_sample": True, "temperature": 0.7, "top_k": 1}
        with torch.random.fork_rng():
            sampled = rescored.generate(inputs, **only)
        assert [record.accepted["sampling"] for record in sampled.records] == [8.0] * 3


# ------------------------------------------------------------------ the trained model, end to end


make_spec = partial(
    commands.spec_of,
    "limit=12",
    "model.device=cpu",
    "benchmark=seedling_caption",
    "engine.warmup=0",
)


def run(adapter: Adapter, journal: Journal, *overrides: str) -> Any:
    spec = make_spec(*overrides)
    return evaluate(spec, adapter, build_method(spec.method.name, spec.method.params), journal)


@pytest.mark.slow
def test_seedling_accepts_its_own_captions_to_the_end_token(adapter, tmp_path):
    overrides = ("method=none", "ratio=0", "engine.rescore=true")
    result = run(adapter, Journal(tmp_path / "none.jsonl"), *overrides)
    records = [sample.record for sample in result.samples]
    row = acceptance(records)
    assert row["greedy"] == row["greedy_per_answer"] == row["untouched"] == 1.0
    assert row["first_refusal"] is row["widest_gap"] is None
    assert row["tokens"] == sum(record.new_tokens for record in records) > 12 * 10
    # What the journal holds gives the same row without a model.
    resumed = run(adapter, Journal(tmp_path / "none.jsonl"), *overrides)
    assert resumed.resumed == 12
    assert acceptance([sample.record for sample in resumed.samples]) == row


@pytest.mark.slow
def test_fewer_tokens_are_accepted_where_more_is_dropped(adapter, tmp_path):
    rows = []
    for ratio in (0.5, 0.9):
        journal = Journal(tmp_path / f"{ratio}.jsonl")
        result = run(adapter, journal, "method=random", f"ratio={ratio}", "engine.rescore=true")
        rows.append(acceptance([sample.record for sample in result.samples]))
    assert 1 > rows[0]["greedy"] > rows[1]["greedy"] > 0.2
    assert 1 > rows[0]["sampling"] > rows[1]["sampling"] > 0.2
    assert rows[1]["widest_gap"] > 0.1


@pytest.mark.slow
def test_nothing_is_judged_without_the_setting(adapter, tmp_path):
    result = run(adapter, Journal(tmp_path / "plain.jsonl"), "method=random", "ratio=0.5")
    records = [sample.record for sample in result.samples]
    assert ({record.accepted for record in records}, acceptance(records)) == ({None}, None)


# ------------------------------------------------------------------ the row


def record_of(new_tokens: int, **accepted: float | None) -> SampleRecord:
    return SampleRecord(
        sample="t/0",
        visual=4,
        text=2,
        requested=(),
        kept=(),
        entering=(4,),
        kv_entries=4,
        kv_bytes=64,
        new_tokens=new_tokens,
        times_ms={"rescore": float(new_tokens)},
        accepted=accepted,
    )


def test_the_row_holds_shares_of_all_tokens_and_means_of_answers():
    records = [
        record_of(8, greedy=2, sampling=4.0, first_refusal=1, gap=0.5),
        record_of(2, greedy=2, sampling=1.5, first_refusal=None, gap=None),
        record_of(2, greedy=1, sampling=0.5, first_refusal=0, gap=None),
    ]
    assert acceptance(records) == {
        "tokens": 12,
        "greedy": 5 / 12,
        "greedy_per_answer": pytest.approx((0.25 + 1 + 0.5) / 3),
        "sampling": 0.5,
        "sampling_per_answer": pytest.approx((0.5 + 0.75 + 0.25) / 3),
        "untouched": pytest.approx(1 / 3),
        "first_refusal": 0.5,
        "widest_gap": 0.5,
        "rescore_ms": 2.0,
    }


def test_a_judged_answer_survives_the_journal():
    record = record_of(8, greedy=2, sampling=4.25, first_refusal=None, gap=0.5)
    sample = Sample("t", 0, "yes", 6, 8, record)
    assert Sample.from_entry(json.loads(json.dumps(sample.entry()))) == sample


class Given:
    """Answers of given ids and lengths."""

    def __init__(self, ids, lengths):
        self.batch = GeneratedBatch(
            ids, tuple(record_of(length, greedy=None) for length in lengths)
        )

    def generate(self, inputs, samples=None, **generation):
        return self.batch


def test_a_token_that_the_settings_rule_out_has_no_gap():
    adapter, inputs = Tiny("llava").adapter, Tiny("llava").inputs()
    ids = torch.full((3, 4), 9)
    settings = {"do_sample": True, "top_k": 1, "max_new_tokens": 4}
    assert [
        record.accepted
        for record in Rescored(adapter, Given(ids, (4, 2, 1))).generate(inputs, **settings).records
    ] == [{"greedy": 0, "sampling": 0.0, "first_refusal": 0, "gap": None}] * 3


@pytest.mark.slow
def test_the_row_of_a_run_has_what_was_accepted(tmp_path, capsys):
    shared = [
        *("method=divprune", "ratio=0.9", "benchmark=seedling_caption", "limit=4"),
        *("model.device=cpu", "engine.warmup=0", f"store={tmp_path / 'store'}", "json=true"),
    ]
    rows = []
    for judged in ("true", "false"):
        assert main([*shared, f"engine.rescore={judged}"]) == 0
        rows.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    block, missing = (row["extra"]["acceptance"] for row in rows)
    assert missing is None
    assert block["tokens"] == 4 * rows[0]["extra"]["new_tokens"]
    assert 0 < block["greedy"] < 1
    assert ["judging" in row["extra"]["peak_note"] for row in rows] == [True, False]
    assert rows[0]["metrics"] == rows[1]["metrics"]
    assert rows[0]["run_key"] != rows[1]["run_key"]
