"""A denoising step of the engine compared with the equations written out, with itself, and with the plain model."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.engine.session import Session
from espalier.methods.base import MethodError
from espalier.methods.d3tom import D3ToM
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from espalier.methods.random import Random
from tests.diffusion import models, oracle
from tests.family_runs import NONE
from tests.tiny import CHATS, Scatter

LENGTH = 6


def answering(rows: int, step: int = 1) -> AnswerState:
    words = torch.randint(20, 200, (rows, LENGTH), generator=torch.Generator().manual_seed(5))
    unveiled = torch.tensor([True, False, True, True, False, False]).expand(rows, -1)
    deciders = torch.tensor([False, False, True, True, False, False]).expand(rows, -1)
    return AnswerState(torch.where(unveiled, words, models.MASK), deciders, step)


def run(adapter, method, budget, chats=CHATS, answer=None, **options):
    with DenoisingSession(adapter, method, budget, **options) as session:
        prompt = session.prompt(adapter.encode(chats))
        names = [str(n) for n in range(len(chats))]
        return session.denoise(prompt, answer or answering(len(chats)), names, budget)


def plain(adapter, chats, answer):
    """The model's own forward, with a mask of zeros where every real token is seen."""
    inputs = adapter.encode(chats)
    with Session(adapter, NoReduction(), NONE) as session:
        prompt = session.prompt(inputs)
    words = adapter.model.get_input_embeddings()(answer.ids)
    x = torch.cat([prompt.arguments["inputs_embeds"], words], 1)
    valid = torch.cat([inputs["attention_mask"], torch.ones_like(answer.ids)], 1)
    with torch.inference_mode():
        hidden = adapter.decoder(
            inputs_embeds=x,
            attention_mask=valid,
            position_ids=(valid.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        return x, adapter.model.lm_head(hidden[:, -LENGTH:])


@pytest.mark.parametrize(
    "method", [NoReduction(), D3ToM(K=1, state="entering", similarity="normed"), FastV()]
)
def test_ratio_0_is_the_plain_model_to_the_bit(adapter, method) -> None:
    logits, records = run(adapter, method, NONE)
    assert torch.equal(logits, plain(adapter, CHATS, answering(3))[1])
    assert all(set(record.kept) <= {record.visual} for record in records)


@pytest.mark.parametrize(
    "method",
    [
        D3ToM(0),
        D3ToM(2, "mean"),
        D3ToM(0, "mean", "entering", "normed"),
        D3ToM(2, "sum", "entering", "normed"),
    ],
)
def test_a_step_is_that_of_the_equations(adapter, method) -> None:
    K, answer = method.K, answering(1)
    for chat in CHATS[:2]:
        logits, records = run(adapter, method, Budget("kept", 0.7), [chat], answer)
        x, _ = plain(adapter, [chat], answer)
        visual = adapter.layout(adapter.encode([chat])).visual[0].tolist()
        first = x.shape[1] - LENGTH
        deciders = [first + place for place in answer.deciders[0].nonzero()[:, 0].tolist()]
        keep = records[0].requested[0]
        expected, kept = oracle.step(
            adapter.model, x[0].clone(), visual, deciders, LENGTH, method, keep
        )
        assert records[0].origin.tolist() == kept
        assert (logits[0] - expected).abs().max() < 1e-9
        assert records[0].entering == (len(visual),) * (K + 1) + (keep,) * (4 - K)


@pytest.mark.parametrize("method", [D3ToM(K=1), D3ToM(1, state="entering", similarity="normed")])
@pytest.mark.parametrize("positions", ["original", "renumbered"])
def test_dropping_equals_hiding(adapter, method, positions) -> None:
    logits = [
        run(adapter, method, Budget("kept", 0.6), backend=backend, positions=positions)[0]
        for backend in ("drop", "emulate")
    ]
    assert (logits[0] - logits[1]).abs().max() < 1e-10


@pytest.mark.parametrize(
    "method", [D3ToM(K=2), FastV(K=2, queries="mean"), Random(), Scatter(("vision", 2), merge=True)]
)
def test_a_batch_equals_its_rows_alone(adapter, method) -> None:
    budget, answer = Budget("kept", 0.6), answering(3)
    together, records = run(adapter, method, budget)
    for row, chat in enumerate(CHATS):
        with DenoisingSession(adapter, method, budget) as session:
            prompt = session.prompt(adapter.encode([chat]))
            row_answer = AnswerState(answer.ids[row : row + 1], answer.deciders[row : row + 1], 1)
            alone, (record,) = session.denoise(prompt, row_answer, [str(row)], budget)
        assert (together[row] - alone[0]).abs().max() < 1e-10
        assert records[row].origin.tolist() == record.origin.tolist()
        assert records[row].kept == record.kept


def test_the_model_is_itself_again(adapter) -> None:
    before = [dict(layer.__dict__) for layer in adapter.decoder.layers]
    run(adapter, D3ToM(K=1), Budget("kept", 0.5))
    assert [dict(layer.__dict__) for layer in adapter.decoder.layers] == before


def test_who_decides_is_unknown_outside_a_step(adapter) -> None:
    with pytest.raises(MethodError, match="sessions run token reducers only"):
        Session(adapter, D3ToM(K=1), NONE)
