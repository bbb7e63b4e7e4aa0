"""How often a question makes the host wait for a card, or send to it: each time, all that is queued ends first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.harness.decoding.speculative.drafts import draw_from
from espalier.harness.decoding.speculative.state_machine import Meter
from espalier.harness.engine import generation_loop
from espalier.harness.engine.generation_loop import draw_ids
from espalier.harness.engine.session import Session
from espalier.harness.kinds.rescore import Rescored
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import METHODS
from espalier.harness.tools.rehearsal.simulated_cards import SimulatedCards
from espalier.methods.base import Site, View
from espalier.methods.checks import Conditions, read, require_finite
from espalier.methods.d3tom import D3ToM
from espalier.methods.decoders import Decoder
from espalier.methods.framefusion import FrameFusion
from espalier.methods.none import NoReduction
from espalier.methods.select import attention
from espalier.methods.select.greedy import greedy_picks, rows_for_picks
from espalier.methods.select.groups import Groups
from espalier.methods.select.topk import indices_of
from espalier.methods.top_p import TopP
from tests.cards.cells import PLACEMENTS, adapter_of, outcome
from tests.cards.simulated import Cards, spread
from tests.families import FAMILIES, llada
from tests.family_runs import NONE
from tests.tiny import LLAVA, load_tiny, save_tiny

#: Methods by the most waits of a prompt with its first token, on LLaVA with five decoder layers; they may only fall.
#: Two waits are the library's, and one its check of masks where tokens go before the decoder. The method's own are
#: counts that the next shape follows from: of groups, of an adaptive choice, of a layer's budget.
WAITS = {
    6: (
        *(
            "none",
            "fastv",
            "pyramiddrop",
            "sparsevlm",
            "dart",
            "feather",
            "nuwa",
            "pact",
            "uvprune",
        ),
        *("specvlm", "random_layer2", "uniform_layer2", "dycoke_decode"),
    ),
    7: (
        *("visionzip", "center", "downsample", "fastervlm", "pooled", "prumerge", "prumerge_plus"),
        *("rtprune", "rtprune_none", "random", "uniform", "visiontrim", "top_p", "idpruner"),
        *("cdpruner", "autoprune", "hired", "globalcom2", "divprune_layer2", "rtprune_gtp"),
    ),
    8: (
        *("divprune", "snapkv", "h2o", "lookm", "elastic", "keydiff", "pyramidkv", "recent_kv"),
        *("random_kv", "uniform_kv", "tova", "aim", "hiprune", "holov", "vlmpruner", "vscan"),
        "rtprune_dynamic",
    ),
    9: ("aircache", "prefixkv", "vlcache", "flowcut", "ivtp", "tome", "scope"),
    10: ("btp", "pixelprune"),
    13: ("vispruner",),
}
CEILINGS = {method: waits for waits, methods in WAITS.items() for method in methods}

#: Most sends, of methods that send numbers of their own: random ones, windows of crops, slots of the tower.
SENDS = {
    **dict.fromkeys(("random", "random_layer2", "hired", "globalcom2", "holov"), 7),
    **dict.fromkeys(("nuwa", "prumerge_plus"), 7),
    **dict.fromkeys(("flowcut", "ivtp", "tome", "aim"), 8),
    "rtprune_dynamic": 9,
    "pixelprune": 11,
    "random_kv": 11,
}


def transfers(
    method: str, tokens: int, adapter: Adapter | None = None, name: str = "llava", **options: Any
) -> tuple[int, int]:
    """Of one question: how often the host waits, and how often it sends."""
    options |= {"max_new_tokens": tokens, "batch_size": 1}
    with Cards() as cards:
        model = spread(adapter or adapter_of(name), *PLACEMENTS["one"])
        before = cards.transfers()
        answered = outcome(model, name, method, options, questions=1)
        waits, sends = cards.transfers()
    assert answered[0] != "refused"
    return waits - before[0], sends - before[1]


@pytest.fixture(autouse=True)
def checks_of_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rare as on a GPU."""
    monkeypatch.setattr(generation_loop, "interval", lambda device: 8)


@pytest.mark.sampled(72)
@pytest.mark.parametrize("method", CEILINGS)
def test_a_question_waits_as_rarely_as_it_did(method: str) -> None:
    waits, sends = transfers(method, 1)
    assert waits <= CEILINGS[method]
    assert sends <= SENDS.get(method, 6)
    later = transfers(method, 9)
    # One check of ends in eight steps.
    assert (later[0] - waits, later[1] - sends) == (1, 0)


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["fastv", "snapkv", "lookm", "aircache"])
def test_the_layers_of_a_model_add_no_waits(method: str, tmp_path: Path) -> None:
    facts = replace(LLAVA.facts, text=replace(LLAVA.facts.text, layers=9))
    spec = replace(LLAVA, facts=facts)
    deep = load_tiny(spec, save_tiny(spec, tmp_path), "float32")
    assert transfers(method, 1, deep) == transfers(method, 1)


#: Most sends of a side's part of a round, beside its tokens: a tree has masks, places and the path that was accepted.
TREES = {"sd_tree": 3}
DECODERS = [name for name in METHODS.names() if issubclass(METHODS.load(name), Decoder)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("method", DECODERS)
def test_each_side_of_a_round_waits_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's ids go through the host, since it may run in another process."""
    laps: list[tuple[int, int]] = []
    run = Meter.run

    def counted(meter: Meter, work: Any) -> Any:
        waits, sends = cards.transfers()
        result = run(meter, work)
        after = cards.transfers()
        laps.append((after[0] - waits, after[1] - sends))
        return result

    monkeypatch.setattr(Meter, "run", counted)
    with Cards() as cards:
        model = spread(adapter_of("llava"), *PLACEMENTS["one"])
        options = {"max_new_tokens": 20, "batch_size": 1}
        assert outcome(model, "llava", method, options, questions=1)[0] != "refused"
    # Of two rounds after the prompts'.
    assert {waits for waits, _ in laps[-4:]} == {1}
    assert max(sends for _, sends in laps[-4:]) <= 1 + TREES.get(method, 0)


STEPS = ("none", "fastv_denoising", "redvtp", "d3tom")


@pytest.mark.sampled(36)
@pytest.mark.parametrize("method", STEPS)
@pytest.mark.parametrize("name", llada.DENOISING)
def test_a_denoising_step_waits_once_and_sends_once(name: str, method: str) -> None:
    few, many = (transfers(method, 8, name=name, steps=steps) for steps in (4, 8))
    assert (many[0] - few[0], many[1] - few[1]) == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "fastv"])
def test_a_step_on_a_canvas_waits_no_more_than_the_library_does(method: str) -> None:
    """Its own loop reads four times a step and sends once."""
    few, many = (
        transfers(method, 8, name="diffusion_gemma", max_denoising_steps=steps) for steps in (4, 8)
    )
    assert (many[0] - few[0], many[1] - few[1]) == (16, 4)


def test_answers_on_the_host_are_judged_on_the_card() -> None:
    with Cards():
        model = spread(adapter_of("llava"), *PLACEMENTS["one"])
        with (
            model.open_spec(model.spec) as adapter,
            Session(adapter, NoReduction(), NONE) as session,
        ):
            inputs = adapter.encode(list(FAMILIES["llava"].chats[:1]))
            answered = Rescored(adapter, session).generate(inputs, max_new_tokens=3)
    assert answered.records[0].accepted["greedy"] == answered.records[0].new_tokens


def test_waits_and_sends_are_counted() -> None:
    with Cards() as cards:
        there = torch.ones(3, device="cuda:0")
        waiting = (there.sum().item, there.tolist, there.cpu, there.nonzero, there.any().__bool__)
        for call in (*waiting, lambda: there[there > 0], lambda: there[:2].to("cuda:1") + 1):
            call()
        assert cards.transfers() == (6, 0)
        torch.zeros(1).to("cuda:0").add(torch.tensor([1], device="cuda:0"))
        assert cards.transfers() == (6, 2)


# ---------------------------------------------------------------------- what docstrings state

DRAWS = torch.Generator().manual_seed(0)
SCORES = torch.rand(1, 24, generator=DRAWS)
TOKENS = torch.rand(1, 24, 8, generator=DRAWS)
STATES = torch.rand(2, 24, 8, generator=DRAWS)
GRID = torch.cartesian_prod(*map(torch.arange, (4, 1, 2, 3))).unsqueeze(0)
ON_CARD = partial(Tensor.to, device="cuda")


def view(layer: int) -> View:
    """Of a video on a card, at a layer."""
    signals = {"last_attention": ON_CARD(SCORES)}
    return View(Site("layer", layer), ON_CARD(TOKENS), ON_CARD(GRID), signals)


def in_pass(plan: Callable[[], object]) -> None:
    """Make a plan as an engine does, which reads what must hold with the answer."""
    with Conditions().collecting():
        plan()


STATED: dict[str, tuple[int, Callable[[], object]]] = {
    "indices_of": (0, lambda: indices_of(ON_CARD(SCORES.median() < SCORES), 12)),
    "greedy_picks": (
        0,
        lambda: greedy_picks(
            rows_for_picks(ON_CARD(STATES @ STATES.transpose(1, 2))),
            ON_CARD(SCORES.expand(2, -1)),
            ON_CARD(torch.tensor([3, 5])),
            9,
        ),
    ),
    "attention.rows": (
        0,
        lambda: [*attention.rows(ON_CARD(STATES), ON_CARD(STATES), 1.0, None, block=7)],
    ),
    "draw_ids": (0, lambda: draw_ids(ON_CARD(SCORES))),
    "draw_from": (0, lambda: draw_from(ON_CARD(SCORES[0]), 0.3)),
    "D3ToM.chosen": (0, lambda: D3ToM().chosen(ON_CARD(SCORES), 5)),
    "Groups.of": (1, lambda: Groups.of(ON_CARD(GRID[:, :, 0]))),
    "TopP.plan": (1, lambda: in_pass(lambda: TopP(p=0.5).plan(view(2), 12))),
    "read": (1, lambda: read(ON_CARD(SCORES), ON_CARD(GRID))),
    "require_all": (1, lambda: require_finite(ON_CARD(SCORES), "scores")),
    "FrameFusion.plan": (2, lambda: in_pass(lambda: FrameFusion().plan(view(0), 12))),
}


@pytest.mark.parametrize("name", STATED)
def test_the_host_waits_as_often_as_is_stated(name: str) -> None:
    waits, call = STATED[name]
    with SimulatedCards() as cards:
        call()
    assert cards.reads + cards.waits == waits
