"""How often a question makes the host wait for a card, or send to it: each time, all that is queued ends first."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine import generation_loop
from espalier.harness.engine.session import Session
from espalier.harness.kinds.rescore import Rescored
from espalier.methods.none import NoReduction
from tests.cards.cells import PLACEMENTS, adapter_of, outcome
from tests.cards.simulated import Cards, spread
from tests.families import FAMILIES

WHOLE = Budget("kept", 0.0)

#: Most waits and sends of a prompt with its first token, on LLaVA with five decoder layers. They may only fall.
CEILINGS = {
    "none": (6, 6),
    "fastv": (8, 7),
    "divprune": (9, 7),
    "visionzip": (10, 7),
    "pyramiddrop": (12, 9),
    "dart": (13, 7),
    "sparsevlm": (24, 14),
    "snapkv": (35, 6),
    "lookm": (50, 6),
    "aircache": (52, 6),
}


def transfers(method: str, tokens: int) -> tuple[int, int]:
    """Of one question: how often the host waits, and how often it sends."""
    with Cards() as cards:
        model = spread(adapter_of("llava"), *PLACEMENTS["one"])
        before = cards.transfers()
        outcome(model, "llava", method, {"max_new_tokens": tokens, "batch_size": 1}, questions=1)
        waits, sends = cards.transfers()
    return waits - before[0], sends - before[1]


@pytest.mark.parametrize("method", CEILINGS)
def test_a_prompt_waits_as_rarely_as_it_did(method: str) -> None:
    (waits, sends), (most_waits, most_sends) = transfers(method, 1), CEILINGS[method]
    assert waits <= most_waits
    assert sends <= most_sends


@pytest.mark.parametrize("method", ["none", "fastv", "snapkv"])
def test_a_step_waits_for_the_check_of_ends_alone(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_loop, "interval", lambda device: 8)  # as on a GPU
    first, later = transfers(method, 1), transfers(method, 9)
    assert (later[0] - first[0], later[1] - first[1]) == (1, 0)


def test_answers_on_the_host_are_judged_on_the_card() -> None:
    with Cards():
        model = spread(adapter_of("llava"), *PLACEMENTS["one"])
        with (
            model.open_spec(model.spec) as adapter,
            Session(adapter, NoReduction(), WHOLE) as session,
        ):
            inputs = adapter.encode(list(FAMILIES["llava"].chats[:1]))
            answered = Rescored(adapter, session).generate(inputs, max_new_tokens=3)
    assert answered.records[0].accepted["greedy"] == answered.records[0].new_tokens


def test_waits_and_sends_are_counted() -> None:
    with Cards() as cards:
        there = torch.ones(3, device="cpu:0")
        waiting = (there.sum().item, there.tolist, there.cpu, there.nonzero, there.any().__bool__)
        for call in (*waiting, lambda: there[there > 0], lambda: there[:2].to("cpu:1") + 1):
            call()
        assert cards.transfers() == (6, 0)
        torch.zeros(1).to("cpu:0").add(torch.tensor([1], device="cpu:0"))
        assert cards.transfers() == (6, 2)
