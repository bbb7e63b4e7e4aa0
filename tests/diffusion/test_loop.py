"""Complete denoised answers compared with a loop written out, in batches and alone, and their records."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from espalier.harness.cost.budget import Budget, BudgetError, BudgetMismatch
from espalier.harness.decoding.diffusion.denoising_record import (
    DenoisingRecord,
    diffusion_block,
    verify_steps,
)
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.denoising_steps import DenoisingSession
from espalier.methods.d3tom import D3ToM
from espalier.methods.d3tom_t import D3ToMT
from espalier.methods.fastv import FastV
from espalier.methods.fastv_first_step import FastVFirstStep
from espalier.methods.none import NoReduction
from espalier.methods.random import Random
from espalier.methods.redvtp import RedVTP
from tests.diffusion import models
from tests.diffusion.oracle import reveal
from tests.tiny import CHATS

HOW = {"max_new_tokens": 6, "block_length": 3, "steps": 4}


answers = partial(models.denoised, **HOW)


def written_out(adapter, chat):
    """Two blocks of three places, two steps each: two places, then one."""
    inputs = adapter.encode([chat])
    with DenoisingSession(adapter, NoReduction(), Budget("kept", 0.0)) as session:
        prompt = session.prompt(inputs).arguments["inputs_embeds"]
    ids, logits_of = [models.MASK] * 6, []
    for block in ([0, 1, 2], [3, 4, 5]):
        for count in (2, 1):
            words = adapter.model.get_input_embeddings()(torch.tensor([ids]))
            with torch.inference_mode():
                x = adapter.decoder(
                    inputs_embeds=torch.cat([prompt, words], 1), use_cache=False
                ).last_hidden_state
                logits = adapter.model.lm_head(x[:, -6:])[0]
            logits_of.append(logits)
            reveal(ids, logits, block, count)
    return ids, torch.stack(logits_of)


def test_an_answer_is_that_of_the_loop_written_out(adapter) -> None:
    for chat in CHATS:
        expected, logits = written_out(adapter, chat)
        generated = answers(adapter, NoReduction(), 0.0, [chat], output_logits=True)
        length = generated.records[0].new_tokens
        assert generated.ids[0, :length].tolist() == expected[:length]
        assert length == (expected.index(models.END) + 1 if models.END in expected else 6)
        assert torch.equal(generated.logits[0].view(logits.shape), logits)


def test_behind_its_end_an_answer_is_padding(adapter) -> None:
    generated = models.denoised(adapter, infill="w1</s>w2<mask>", stop="cut")
    words = adapter.processor.tokenizer.encode("w1</s>", add_special_tokens=False)
    for ids in generated.ids.tolist():
        assert ids == words + [adapter.pad_id] * (len(ids) - len(words))


CACHED = {"prefix_cache": True}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("method", "how"),
    [
        *((method, {}) for method in (D3ToM(K=1), D3ToMT(K=1), RedVTP(), FastVFirstStep(K=2))),
        *((method, CACHED) for method in (D3ToM(K=1), D3ToMT(K=1, targets="prompt"))),
        *((method, CACHED) for method in (FastV(), Random())),
    ],
)
def test_ratio_0_has_the_plain_logits_at_every_step(adapter, method, how) -> None:
    plain = answers(adapter, NoReduction(), 0.0, output_logits=True, **how)
    generated = answers(adapter, method, 0.0, output_logits=True, **how)
    assert torch.equal(generated.ids, plain.ids)
    assert torch.equal(generated.logits, plain.logits)


@pytest.mark.parametrize(
    ("method", "how"),
    [
        (D3ToMT(K=1), {"temperature": 0.0}),
        (D3ToMT(K=1), {"temperature": 0.8}),
        *(
            (method, {"temperature": 0.8, **CACHED})
            for method in (D3ToMT(K=1), D3ToM(K=1, targets="prompt"), FastV(K=2))
        ),
    ],
)
def test_a_batch_equals_its_rows_alone(adapter, method, how) -> None:
    together = answers(adapter, method, 0.6, output_logits=True, **how)
    for row, chat in enumerate(CHATS):
        single = answers(adapter, method, 0.6, [chat], output_logits=True, **how)
        assert (together.logits[row] - single.logits[0]).abs().max() < 1e-10
        assert together.ids[row].tolist() == single.ids[0].tolist()
        assert together.records[row].denoising == single.records[0].denoising


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_records_tell_each_step(adapter, prefix_cache) -> None:
    method, budget = D3ToMT(K=1), Budget("kept", 0.5)
    generated = answers(adapter, method, 0.5, prefix_cache=prefix_cache)
    for record in generated.records:
        denoising = DenoisingRecord.from_entry(record.denoising)
        n = record.visual
        assert denoising.kept == ((n,), (n,), (n // 2,), (1,))
        assert denoising.entering == tuple((2 * n + 3 * kept) / 5 for (kept,) in denoising.kept)
        assert verify_steps(method, budget, adapter.facts, record)["kept"] == (n + n // 2 + 1) / 3
    block = diffusion_block(generated.records)
    assert (block["per_step"]["reveals"], block["steps"]) == ([2, 1, 2, 1], 4)
    with pytest.raises(BudgetMismatch, match="denoising step 1"):
        verify_steps(method, Budget("kept", 0.9), adapter.facts, generated.records[0])


def test_a_method_of_every_prefill_acts_at_every_step(adapter) -> None:
    denoising = answers(adapter, FastV(K=2, queries="mean"), 0.5, CHATS[:1]).records[0].denoising
    assert denoising["kept"] == [[8]] * 4


def test_the_average_rule_counts_all_layers(adapter) -> None:
    """Inside layer 1 of 5, two layers are entered by every token."""
    budgets = step_budgets(D3ToM(K=1), Budget("average", 0.3), adapter.facts, 4)
    assert [budget.ratio for budget in budgets] == pytest.approx([0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        (Budget("average", 0.6), "leaves no token under budget=average.*0 <= ratio < 0.6"),
        (Budget("kept", 1.0), "leaves no token under budget=kept"),
        (Budget("flops", 0.5), "budget='flops' cannot be followed by D3ToM"),
    ],
)
def test_a_ratio_that_leaves_no_token_is_refused(adapter, budget, line) -> None:
    with pytest.raises(BudgetError, match=line):
        step_budgets(D3ToM(K=1), budget, adapter.facts, 4)
