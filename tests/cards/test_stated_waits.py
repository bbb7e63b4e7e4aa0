"""Docstrings that state how often the host waits for a card are true."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from espalier.harness.decoding.speculative.drafts import draw_from
from espalier.harness.engine.generation_loop import draw_ids
from espalier.harness.tools.rehearsal.simulated_cards import SimulatedCards
from espalier.methods.base import Site, View
from espalier.methods.checks import Conditions, read, require_finite
from espalier.methods.d3tom import D3ToM
from espalier.methods.framefusion import FrameFusion
from espalier.methods.select import attention
from espalier.methods.select.greedy import greedy_picks, rows_for_picks
from espalier.methods.select.groups import Groups
from espalier.methods.select.topk import indices_of
from espalier.methods.top_p import TopP

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
            rows_for_picks(ON_CARD(STATES[0] @ STATES[0].T)),
            ON_CARD(SCORES[0]),
            ON_CARD(torch.tensor(3)),
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
