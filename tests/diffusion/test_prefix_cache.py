"""Answers with a cached prompt compared with the recomputed sequence and with D3ToM's merging written out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, partialmethod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.flops import cached_prompt_flops, head_flops
from espalier.harness.decoding.diffusion.answer_flops import cached_flops, run_flops
from espalier.harness.decoding.diffusion.denoising_loop import DenoisingGenerator
from espalier.harness.decoding.diffusion.denoising_record import (
    denoising_records,
    diffusion_block,
)
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.errors import Refused
from espalier.methods.d3tom import D3ToM
from espalier.methods.d3tom_t import D3ToMT
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from espalier.methods.select.entries import (
    Entries,
    EntryStore,
    KeptEntries,
    PromptEntries,
    merged_entries,
)
from tests.diffusion import models, prefix_oracle
from tests.diffusion.oracle import reveal
from tests.diffusion.test_step import LENGTH, answering
from tests.family_runs import NONE
from tests.tiny import CHATS, Scatter

HOW = {"max_new_tokens": 6, "block_length": 3, "steps": 4, "prefix_cache": True}


answers = partial(models.denoised, output_logits=True, **HOW)


def one_step(adapter, method, budget, answer, chats=CHATS, **options):
    with DenoisingSession(adapter, method, budget, **options) as session:
        prompt = session.prompt(adapter.encode(chats))
        names = [str(n) for n in range(len(chats))]
        cached = session.cache_prompt(prompt, names, LENGTH)
        return session.denoise_cached(cached, answer, names, budget)


def entered(adapter, chat, ids):
    """Return (L, D) what one sample's sequence is when it enters the decoder, and the tokens of its prompt."""
    with DenoisingSession(adapter, NoReduction(), NONE) as session:
        prompt = session.prompt(adapter.encode([chat])).arguments["inputs_embeds"][0]
    return torch.cat([prompt, adapter.model.get_input_embeddings()(ids)]).detach(), len(prompt)


def visual_of(adapter, chat) -> list[int]:
    return adapter.layout(adapter.encode([chat])).visual[0].tolist()


# ---------------------------------------------------------------------- without a method


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "attention", "most"),
    # Eager attention has its softmax in single precision, whatever the type.
    [("float64", "sdpa", 1e-9), ("float32", "sdpa", 1e-5), ("float32", "eager", 1e-5)],
)
def test_every_step_is_the_whole_sequence_under_the_prefix_mask(
    folder, dtype, attention, most
) -> None:
    """Prompts of different lengths in one batch; the words of each step follow from the step before."""
    adapter = models.load(folder, dtype, attention)
    generated = answers(adapter, NoReduction(), 0.0)
    logits = generated.logits.view(len(CHATS), 4, 6, -1)
    for row, chat in enumerate(CHATS):
        ids, step = torch.full((6,), models.MASK), 0
        for block in ([0, 1, 2], [3, 4, 5]):
            for count in (2, 1):
                x, prompt = entered(adapter, chat, ids)
                expected = prefix_oracle.recomputed(adapter.model, x, prompt)
                assert (logits[row, step] - expected).abs().max() < most
                reveal(ids, expected, block, count)
                step += 1
        length = generated.records[row].new_tokens
        assert generated.ids[row, :length].tolist() == ids[:length].tolist()


def test_a_prompt_that_sees_the_answer_says_something_else(adapter) -> None:
    cached, recomputed = (
        answers(adapter, NoReduction(), 0.0, prefix_cache=cached).logits for cached in (True, False)
    )
    assert (cached - recomputed).abs().max() > 1e-3


# ---------------------------------------------------------------------- methods of every prefill


def test_what_leaves_the_prompt_is_seen_by_nobody_behind_that_layer(adapter) -> None:
    K, answer = 2, answering(3)
    logits, records = one_step(adapter, FastV(K=K), Budget("kept", 0.6), answer)
    for row, chat in enumerate(CHATS):
        x, prompt = entered(adapter, chat, answer.ids[row])
        visual, kept = visual_of(adapter, chat), records[row].origin.tolist()
        gone = {place: K for n, place in enumerate(visual) if n not in kept}
        assert len(gone) == len(visual) - records[row].kept[0]
        expected = prefix_oracle.recomputed(adapter.model, x, prompt, gone)
        assert (logits[row] - expected).abs().max() < 1e-9


@pytest.mark.sampled
@pytest.mark.parametrize(
    "method", [FastV(K=2), Scatter(("prefix", 3)), Scatter(("vision", 2), merge=True)]
)
@pytest.mark.parametrize("positions", ["original", "renumbered"])
def test_dropping_equals_hiding(adapter, method, positions) -> None:
    outputs = [
        answers(adapter, method, 0.6, backend=backend, positions=positions)
        for backend in ("drop", "emulate")
    ]
    assert (outputs[0].logits - outputs[1].logits).abs().max() < 1e-10
    assert outputs[0].ids.tolist() == outputs[1].ids.tolist()


# ---------------------------------------------------------------------- merging in the cache


@pytest.mark.sampled(18)
@pytest.mark.parametrize("method", [D3ToM(K=0), D3ToM(K=2, targets="prompt"), D3ToM(K=3)])
@pytest.mark.parametrize("positions", ["original", "renumbered"])
def test_a_step_merges_the_cache_as_written_out(adapter, method, positions) -> None:
    """Rows of other lengths in one batch, so that what is left has to be padded."""
    answer = answering(3)
    logits, records = one_step(adapter, method, Budget("kept", 0.7), answer, positions=positions)
    for row, chat in enumerate(CHATS):
        x, prompt = entered(adapter, chat, answer.ids[row])
        deciders = answer.deciders[row].nonzero()[:, 0].tolist()
        keep, visual = records[row].kept[0], visual_of(adapter, chat)
        expected, kept = prefix_oracle.step(
            adapter.model, x, prompt, visual, deciders, method, keep, positions == "renumbered"
        )
        assert records[row].origin.tolist() == kept
        assert (logits[row] - expected).abs().max() < 1e-9
        n, later_layers = len(visual), 5 - method.K - 1
        assert records[row].entering == (n,) * (method.K + 1) + (keep,) * later_layers
        assert records[row].kv_entries == 5 * n


def test_each_step_merges_the_whole_cache_anew(adapter) -> None:
    """A step by other deciders in between changes nothing of the next."""
    method, budget, names = D3ToM(K=1), Budget("kept", 0.7), ["0", "1", "2"]
    answer = answering(3)
    changed = AnswerState(answer.ids, answer.deciders.roll(2, 1), 1)
    with DenoisingSession(adapter, method, budget) as session:
        cached = session.cache_prompt(session.prompt(adapter.encode(CHATS)), names, LENGTH)
        first, _ = session.denoise_cached(cached, answer, names, budget)
        between, _ = session.denoise_cached(cached, changed, names, budget)
        repeated, _ = session.denoise_cached(cached, answer, names, budget)
    assert torch.equal(first, repeated)
    assert (first - between).abs().max() > 1e-4


# ---------------------------------------------------------------------- a choice that steps share


def cached_steps(adapter, method, steps, chats=CHATS, **options):
    """Return logits and records of steps, pairs of an answer and a ratio, of one cached prompt."""
    names = [str(n) for n in range(len(chats))]
    with DenoisingSession(adapter, method, NONE, **options) as session:
        cached = session.cache_prompt(session.prompt(adapter.encode(chats)), names, LENGTH)
        return [
            session.denoise_cached(cached, answer, names, Budget("kept", ratio))
            for answer, ratio in steps
        ]


def answer_at(step: int, rows: int = len(CHATS)) -> AnswerState:
    """An answer with words and deciders of its own at each step."""
    answer = answering(rows)
    return AnswerState(answer.ids.roll(step, 1), answer.deciders.roll(step, 1), step)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("targets", ["visual", "prompt"])
@pytest.mark.parametrize("positions", ["original", "renumbered"])
def test_steps_share_a_choice_as_written_out(adapter, K, targets, positions) -> None:
    """The first and third step choose; the second and fourth attend to what was merged by those deciders."""
    method = D3ToM(K=K, targets=targets, every=2)
    answers = [answer_at(step) for step in (1, 2, 3, 4)]
    steps = [(answer, 0.7) for answer in answers]
    results = cached_steps(adapter, method, steps, positions=positions)
    for row, chat in enumerate(CHATS):
        visual, held = visual_of(adapter, chat), None
        for answer, (logits, records) in zip(answers, results, strict=True):
            x, prompt = entered(adapter, chat, answer.ids[row])
            deciders = answer.deciders[row].nonzero()[:, 0].tolist()
            case = (adapter.model, x, prompt, visual, deciders, method, records[row].kept[0])
            expected, kept = prefix_oracle.step(*case, positions == "renumbered", held)
            assert records[row].origin.tolist() == kept
            assert (logits[row] - expected).abs().max() < 1e-9
            held = kept if held is None else None
    selecting = [records[0].times_ms["select"] > 0 for _, records in results]
    assert selecting == [True, False, True, False]


def test_a_step_with_another_budget_or_after_a_whole_one_chooses(adapter) -> None:
    shared, paper = D3ToM(K=1, every=9), D3ToM(K=1)
    steps = [(answer_at(step), ratio) for step, ratio in enumerate((0, 0.5, 0.7, 0, 0.7, 0.7))]
    results, expected = (cached_steps(adapter, method, steps) for method in (shared, paper))
    same = [torch.equal(a, b) for (a, _), (b, _) in zip(results, expected, strict=True)]
    assert same == [True, True, True, True, True, False]


@pytest.mark.parametrize("shifted", [False, True])
def test_answers_that_share_choices_are_the_same_in_any_batch(folder, shifted) -> None:
    """With several pictures in one prompt, and where positions predict the next token."""
    adapter, method = models.load(folder, shifted=shifted), D3ToM(K=1, every=2)
    together = answers(adapter, method, 0.7)
    for row, chat in enumerate(CHATS):
        alone = answers(adapter, method, 0.7, [chat])
        assert (together.logits[row] - alone.logits[0]).abs().max() < 1e-9
        assert together.records[row].denoising == alone.records[0].denoising


@pytest.mark.parametrize(("every", "choices"), [(1, 3), (2, 2), (3, 1)])
def test_what_merges_is_counted(adapter, monkeypatch, every, choices) -> None:
    """Three of four steps merge in three layers, for three rows."""
    calls = []

    def counted(self, *args, name, run):
        calls.append(name)
        return run(self, *args)

    for name in ("chosen", "merged"):
        run = getattr(D3ToM, name)
        monkeypatch.setattr(D3ToM, name, partialmethod(counted, name=name, run=run))
    answers(adapter, D3ToM(K=1, every=every), 0.5)
    assert calls.count("chosen") == 3 * choices
    assert calls.count("merged") == 3 * 3 * choices


def test_flops_of_a_step_that_keeps_a_choice_are_those_that_torch_counts(folder) -> None:
    """Such a step has no other product than its count; eager attention, since the counter sees its products in full."""
    adapter, method, chats = models.load(folder, "float32"), D3ToM(K=1, every=2), CHATS[:1]
    choosing, holding = (answer_at(step, 1) for step in (1, 2))
    with DenoisingSession(adapter, method, NONE) as session:
        cached = session.cache_prompt(session.prompt(adapter.encode(chats)), ["0"], LENGTH)
        budget = Budget("kept", 0.5)
        session.denoise_cached(cached, choosing, ["0"], budget)
        adapter.model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter:
            _, (record,) = session.denoise_cached(cached, holding, ["0"], budget)
    step = cached_prompt_flops(adapter.facts, record.entering, record.text, LENGTH)
    assert record.entering[-1] < record.visual
    assert counter.get_total_flops() == step + head_flops(adapter.facts, LENGTH)


def test_half_precision_merges_too(folder) -> None:
    generated = answers(models.load(folder, "bfloat16"), D3ToM(K=1, targets="prompt"), 0.7)
    assert bool(generated.logits.isfinite().all())


def test_a_worked_example_of_entries() -> None:
    """A word and three visual tokens, of which the last leaves; the word is most like it, then the first of the others.

    Norms are 5, 4 and 2, so that visual targets have 3 on average and all that stay 11 / 3.
    """
    keys = torch.tensor([[(0, 5), (4, 0), (0, -2), (3, 4)]], dtype=torch.double)
    values = 2 * keys.flip(-1)
    choice = KeptEntries(torch.tensor([1, 2, 3]), torch.tensor([0, 1]), 4)
    stores = [EntryStore(rows.transpose(0, 1).contiguous()) for rows in (keys, values)]
    entries = Entries(PromptEntries(*stores), choice)
    for targets, rows in {
        "visual": [(3 * 7 / 65**0.5, 3 * 4 / 65**0.5), (0, -3)],
        "prompt": [(11 / 3 / 10**0.5, 11 / 10**0.5), (11 / 3, 0), (0, -11 / 3)],
    }.items():
        merged, weights = merged_entries(entries, targets)
        torch.testing.assert_close(merged, torch.tensor([rows], dtype=torch.double))
        torch.testing.assert_close(weights, 2 * merged.flip(-1))


# ---------------------------------------------------------------------- budgets, counts, the row


def test_the_released_schedule_is_told_of_no_step_behind_a_cache(adapter) -> None:
    method, budget = D3ToMT(K=1, direction="released"), Budget("kept", 0.5)
    cached = step_budgets(method, budget, adapter.facts, 4, cached=True)
    assert [step_budget.ratio for step_budget in cached] == [0, 0.5, 0.5, 0.5]
    assert step_budgets(method, budget, adapter.facts, 4) != cached
    rising = D3ToMT(K=1)
    assert step_budgets(rising, budget, adapter.facts, 4, True) == step_budgets(
        rising, budget, adapter.facts, 4
    )


def test_records_tell_the_path_and_what_is_held(adapter) -> None:
    method = D3ToMT(K=1)
    generated = answers(adapter, method, 0.5)
    text, heads = adapter.facts.text, adapter.facts.text.kv_heads
    for record, chat in zip(generated.records, CHATS, strict=True):
        layout, n = adapter.layout(adapter.encode([chat])), record.visual
        assert (record.text, record.kv_entries) == (layout.text[0], 5 * n)
        assert record.times_ms["prefill"] > 0
    slots = adapter.encode(CHATS)["input_ids"].shape[1] + 6  # padding, and the answer's places
    assert generated.records[0].kv_bytes == 2 * 5 * heads * text.head_dim * 8 * slots
    assert diffusion_block(generated.records)["path"] == "prefix_cache"
    recomputed = answers(adapter, method, 0.5, prefix_cache=False)
    assert diffusion_block(recomputed.records)["path"] == "recomputed"
    assert recomputed.records[0].kv_bytes == recomputed.records[0].kv_entries == 0


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("method", [NoReduction(), Scatter((2,))])
def test_flops_are_those_that_torch_counts(folder, method, shifted) -> None:
    """Eager attention, since the counter sees its products in full."""
    adapter, budget = models.load(folder, "float32", "eager", shifted), Budget("kept", 0.5)
    with DenoisingSession(adapter, method, budget) as session:
        prompt = session.prompt(adapter.encode(CHATS[:1]))
        denoiser = DenoisingGenerator(session, adapter)
        with FlopCounterMode(display=False) as counter:
            (record,) = denoiser.generate(prompt, ["0"], **HOW).records
    counted = run_flops(method, adapter.facts, record)
    assert counted.exact.language == counter.get_total_flops()
    if isinstance(method, NoReduction):
        assert counted.exact == counted.exact_full
    else:
        assert counted.exact.language < counted.exact_full.language


def test_flops_of_merging_leave_the_prompt_whole(adapter) -> None:
    record = answers(adapter, D3ToM(K=1), 0.5, CHATS[:1]).records[0]
    (denoising,) = denoising_records([record])
    counted = cached_flops(D3ToM(K=1), adapter.facts, record, denoising)
    text, spared = adapter.facts.text, record.visual - record.kept[0]
    # Three steps in which six places do not see what has gone, in three layers.
    pairs = 3 * 6 * spared * 3
    saved = counted.exact_full.language - counted.exact.language
    assert saved == 4 * text.heads * text.head_dim * pairs
    for name, per_pair in (("d2pruner", 2), ("d3tom", 2), ("rtprune", 4)):
        assert counted.paper_full[name] - counted.paper[name] == per_pair * text.hidden * pairs
    # Merging from the first step on leaves the prompt's own pass as it is.
    early = replace(denoising, kept=denoising.kept[1:2] * 4)
    counted = cached_flops(D3ToM(K=1), adapter.facts, record, early)
    saved = counted.exact_full.language - counted.exact.language
    assert 3 * saved == 4 * 4 * text.heads * text.head_dim * pairs


# ---------------------------------------------------------------------- refusals after admission


def test_a_model_of_another_mask_is_refused_when_asked(adapter, monkeypatch) -> None:
    facts = replace(adapter.spec.facts, diffusion=replace(models.DIFFUSION, prefix_cache=False))
    monkeypatch.setattr(adapter, "spec", replace(adapter.spec, facts=facts))
    with pytest.raises(Refused, match=r"prefix_cache=false\); valid: false"):
        answers(adapter, NoReduction(), 0.0)
