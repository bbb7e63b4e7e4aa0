"""Records of denoised answers: FLOPs of complete runs, counts of steps, times."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from weakref import ReferenceType, ref

import pytest
import torch

from espalier.harness.cost.budget import Budget, BudgetMismatch
from espalier.harness.cost.flops import head_flops, mlp_flops, split_layer, text_flops
from espalier.harness.decoding.diffusion.answer_flops import run_flops
from espalier.harness.decoding.diffusion.denoising_record import (
    DenoisedStep,
    DenoisingRecord,
    denoising_records,
    diffusion_block,
    record_of,
    step_times,
    verify_steps,
)
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.engine.denoising_steps import DenoisingSession
from espalier.harness.engine.forward_pass import Pass
from espalier.harness.engine.record import SampleRecord
from espalier.methods.d3tom import D3ToM
from espalier.methods.fastv_denoising import FastVDenoising
from espalier.methods.none import NoReduction
from espalier.methods.pyramiddrop import PyramidDrop
from espalier.methods.random import Random
from tests.diffusion import models
from tests.tiny import CHATS


def answers(adapter, method, chats=CHATS, ratio=0.5, **how):
    how = {"max_new_tokens": 6, "steps": 4, **how}
    return models.denoised(adapter, method, ratio, chats, **how)


def test_a_run_costs_its_steps(adapter) -> None:
    """Decoder at every step, head for the masked places; the tower once."""
    facts, method = adapter.facts, FastVDenoising(K=2)
    (record,) = answers(adapter, method, CHATS[:1], steps=3).records
    text = record.text + 6
    flops = run_flops(method, facts, record)
    layers = [(16,) * 5, (16, 16, 8, 8, 8), (16, 16, 8, 8, 8)]
    assert flops.exact.text == sum(text_flops(facts, counts, text) for counts in layers)
    assert flops.exact_full.text == 3 * text_flops(facts, (16,) * 5, text)
    masked = head_flops(facts, 6) + head_flops(facts, 4) + head_flops(facts, 2)
    assert flops.exact.head == flops.exact_full.head == masked
    twice = run_flops(method, facts, answers(adapter, method, CHATS[:1], steps=6).records[0])
    assert twice.exact.tower == flops.exact.tower


def test_a_layer_in_halves_saves_its_mlp(adapter) -> None:
    """Merging inside layer 1 is dropping before layer 2, and layer 1's MLP on fewer tokens."""
    facts, merging, dropping = adapter.facts, D3ToM(K=1), FastVDenoising(K=2)
    (record,) = answers(adapter, merging, CHATS[:1], steps=3).records
    saved = 2 * 8 * mlp_flops(facts.text)
    merged, dropped = (run_flops(method, facts, record) for method in (merging, dropping))
    assert dropped.exact.text - merged.exact.text == saved
    # Of the papers D3ToM alone counts the split layer.
    (denoising,) = denoising_records([record])
    split = sum(split_layer(facts.text, record.visual, kept[0]) for kept in denoising.kept)
    assert merged.paper == {**dropped.paper, "d3tom": dropped.paper["d3tom"] + split}


def test_without_a_site_every_token_stays(adapter) -> None:
    generated = answers(adapter, NoReduction(), CHATS[:1])
    assert diffusion_block(generated.records)["per_step"]["kept"] == [16.0] * 4


def test_the_control_keeps_the_same_tokens_at_each_step(adapter) -> None:
    for record in answers(adapter, Random()).records:
        assert len({tuple(origin.tolist()) for origin in record.origins}) == 1
        assert len(record.origins) == 4


def test_the_last_site_counts(adapter) -> None:
    generated = answers(adapter, PyramidDrop(), CHATS[:1])
    per_step = diffusion_block(generated.records)["per_step"]
    assert per_step["kept"] == per_step["requested"] == [8.0] * 4


def test_samples_with_different_steps_have_no_mean_of_one(adapter) -> None:
    records = [answers(adapter, D3ToM(K=1), CHATS[:1], steps=n).records[0] for n in (2, 4)]
    block = diffusion_block(records)
    assert block["per_step"] is None
    assert block["steps"] == 3
    with pytest.raises(ValueError, match="1 of 2 answers were not denoised"):
        denoising_records([records[0], replace(records[1], denoising=None)])


@pytest.mark.parametrize("change", [-1, 1])
def test_another_count_than_asked_is_an_error(adapter, change) -> None:
    method, budget = D3ToM(K=1), Budget("kept", 0.5)
    (record,) = answers(adapter, method, CHATS[:1]).records
    verify_steps(method, budget, adapter.facts, record)
    denoising = DenoisingRecord.from_entry(record.denoising)
    kept = (*denoising.kept[:2], (denoising.kept[2][0] + change,), denoising.kept[3])
    changed = replace(record, denoising=replace(denoising, kept=kept).entry())
    with pytest.raises(BudgetMismatch, match="denoising step 2: kept"):
        verify_steps(method, budget, adapter.facts, changed)


def test_what_was_asked_stands_beside_what_was_kept() -> None:
    """Of methods that may keep another count than they are asked for."""
    denoising = DenoisingRecord(4, (2, 2), ((8,), (4,)), ((8,), (5,)), (8.0, 6.0))
    assert DenoisingRecord.from_entry(denoising.entry()) == denoising
    record = SampleRecord("0", 8, 3, (4,), (5,), (8, 5), 0, 0, 2, denoising=denoising.entry())
    block = diffusion_block([record])
    assert block["per_step"]["requested"] == [8, 4]
    assert block["per_step"]["kept"] == [8, 5]


def test_a_sample_has_the_time_of_its_steps() -> None:
    step = SampleRecord("0", 8, 3 + 6, (4,), (4,), (8, 4), 0, 0, 0, times_ms={"select": 2.0})
    how = Denoising(6, 6, 3)
    counts = ((6, 16.0), (4, 8.0), (2, 6.0))
    steps = [DenoisedStep((step,), [scored], [2], ms) for scored, ms in counts]
    record = record_of(steps, 0, how, 2, 5.0)
    assert record.times_ms == {
        "vision": 5.0,
        "select": 6.0,
        "prefill": 0.0,
        "decode": 30.0,
        "decode_per_token": 5.0,
        "first_step": 16.0,
        "later_step": 7.0,
    }
    assert (record.text, record.new_tokens) == (3, 2)


def test_times_of_a_batch_are_shared_out(adapter, monkeypatch) -> None:
    """A clock that goes on by 6 s whenever it is read: 2 s a row of three, and as much for each of four steps."""
    now, phases = iter(range(0, 600, 6)), iter(range(0, 600 * 10**9, 6 * 10**9))
    monkeypatch.setattr(
        "espalier.harness.decoding.diffusion.denoising_loop.time.perf_counter",
        lambda: float(next(now)),
    )
    monkeypatch.setattr("espalier.harness.cost.clock.perf_counter_ns", lambda: next(phases))
    for record in answers(adapter, NoReduction(), ratio=0.0).records:
        # The tower's phase begins and ends inside.
        assert (record.times_ms["vision"], record.times_ms["decode"]) == (6000, 8000)
        assert record.times_ms["first_step"] == record.times_ms["later_step"] == 2000


def test_nobody_decides_before_the_first_step(adapter, monkeypatch) -> None:
    """Those who decide are the places unveiled in the step before, no others."""
    views = []
    denoise = DenoisingSession.denoise

    def watched(self, prompt, answer, samples, budget):
        views.append((answer.ids != models.MASK, answer.deciders))
        return denoise(self, prompt, answer, samples, budget)

    monkeypatch.setattr(DenoisingSession, "denoise", watched)
    answers(adapter, D3ToM(K=1), CHATS[:1], steps=3)
    assert not views[0][1].any()
    for (before, _), (after, deciders) in pairwise(views):
        assert torch.equal(deciders, after & ~before)
        assert deciders.sum() == 2


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.5}, 0.0),
        ({"do_sample": True, "temperature": 0.5}, 0.5),
        ({"temperature": 0.5}, 0.5),
    ],
)
def test_words_are_drawn_only_where_that_is_said(settings, temperature) -> None:
    assert (
        Denoising.of({"max_new_tokens": 4, **settings}, models.DIFFUSION).temperature == temperature
    )


def test_a_row_says_where_later_steps_take_longer_than_the_whole_one() -> None:
    """Of methods that leave the first step whole; the reader knows then that counted FLOPs save no time."""

    def record(later: float, *kept: int) -> SampleRecord:
        denoising = DenoisingRecord(4, (2, 2), ((8,), (4,)), tuple((n,) for n in kept), (8.0, 6.0))
        times = {"first_step": 2.0, "later_step": later}
        return SampleRecord(
            "0", 8, 3, (4,), (4,), (8, 4), 0, 0, 2, times_ms=times, denoising=denoising.entry()
        )

    assert step_times([record(3.0, 8, 4)]) == {"first": 2.0, "later": 3.0, "longer": True}
    assert step_times([record(1.0, 8, 4)])["longer"] is False
    assert step_times([record(3.0, 4, 4)])["longer"] is None
    assert step_times([record(3.0, 8, 8)])["longer"] is None
    untimed = replace(record(3.0, 8, 4), times_ms={})
    assert step_times([untimed]) == {"first": None, "later": None, "longer": None}


@pytest.mark.slow
def test_times_of_a_step_do_not_hold_its_pass(adapter, monkeypatch) -> None:
    """A pass has the tensors of a prompt, and an answer as many passes as steps."""
    passes: list[ReferenceType[Pass]] = []
    step_records = Pass.step_records

    def watched(current: Pass) -> tuple[SampleRecord, ...]:
        gc.collect()
        assert not any(earlier() for earlier in passes)
        passes.append(ref(current))
        return step_records(current)

    monkeypatch.setattr(Pass, "step_records", watched)
    answers(adapter, D3ToM(K=1), CHATS[:1], steps=3)
    assert len(passes) == 3
