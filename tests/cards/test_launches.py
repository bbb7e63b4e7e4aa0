"""Kernels of a pick and of a step, which may only become fewer: on a small model they cost more than the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.specs.run_spec import DecodeLoop
from espalier.harness.tools.rehearsal.simulated_cards import SimulatedCards
from espalier.methods.base import Site, View
from espalier.methods.idpruner import IDPruner
from espalier.methods.none import NoReduction
from espalier.methods.scope import SCOPE
from espalier.methods.select.cosines import cosines
from espalier.methods.select.dpp import dpp_map
from espalier.methods.select.independent import Within, independent_set
from espalier.methods.select.maxmin import farthest_first, farthest_places
from tests.cards.cells import PLACEMENTS, adapter_of
from tests.cards.simulated import spread
from tests.families import FAMILIES

TOKENS = torch.randn(2, 120, 8, generator=torch.Generator().manual_seed(0))
SCORES = torch.rand(2, 120, generator=torch.Generator().manual_seed(1))
GRID = torch.cartesian_prod(*map(torch.arange, (1, 1, 10, 12))).expand(2, -1, -1)
SIGNALS = {"cls_attention": SCORES, "tile": torch.zeros(2, 120, dtype=torch.long)}
NEAR = (SCORES.unsqueeze(2) - SCORES.unsqueeze(1)).abs() < 0.01
ON_CARD = partial(Tensor.to, device="cuda")


def view(n: int) -> View:
    """A view of the first n samples on a card."""
    signals = {name: ON_CARD(signal[:n]) for name, signal in SIGNALS.items()}
    return View(Site("vision"), ON_CARD(TOKENS[:n]), ON_CARD(GRID[:n]), signals)


#: Most kernels of one pick for one sample, and for two.
PICKS: dict[str, tuple[float, float, Callable[[View, int], object]]] = {
    "divprune": (2.25, 3.25, lambda view, keep: farthest_first(cosines(view.tokens), keep)),
    "idpruner": (2.25, 3.25, lambda view, keep: IDPruner().plan(view, keep)),
    "independent": (
        *(2.25, 3.25),
        lambda view, keep: independent_set(
            view.signals["cls_attention"], Within(ON_CARD(NEAR[: len(view.tokens)])), keep
        ),
    ),
    "places": (2.25, 3.25, lambda view, keep: farthest_places(view.grid, keep)),
    "scope": (8, 10, lambda view, keep: SCOPE().plan(view, keep)),
    "cdpruner": (
        *(9, 11),
        lambda view, keep: dpp_map(cosines(view.tokens), view.signals["cls_attention"], keep),
    ),
}


def launches(name: str, samples: int, keep: int) -> int:
    with SimulatedCards() as cards:
        PICKS[name][2](view(samples), keep)
    return cards.kernels


@pytest.mark.sampled
@pytest.mark.parametrize("name", PICKS)
@pytest.mark.parametrize("samples", [1, 2])
def test_a_pick_launches_as_few_kernels_as_it_did(name: str, samples: int) -> None:
    few, many = (launches(name, samples, keep) for keep in (20, 60))
    assert (many - few) / 40 <= PICKS[name][samples - 1]


@pytest.mark.sampled
@pytest.mark.parametrize("repeated", [0, 1, 30])
@pytest.mark.parametrize("keep", [1, 7, 50, 110])
def test_picks_on_a_card_are_those_of_the_host(keep: int, repeated: int) -> None:
    """Also where tokens are alike."""
    tokens = TOKENS.clone()
    tokens[:, 40 : 40 + repeated] = tokens[:, :repeated]
    with SimulatedCards():
        on_card = farthest_first(cosines(ON_CARD(tokens)), keep).cpu()
    assert on_card.equal(farthest_first(cosines(tokens), keep))


@pytest.mark.sampled
@pytest.mark.parametrize("keep", [1, 5, 40, 110])
@pytest.mark.parametrize("mmr_lambda", [0.0, 0.3, 0.5, 1.0])
def test_relevant_picks_on_a_card_are_those_of_the_host(keep: int, mmr_lambda: float) -> None:
    def plan(place: Callable[[Tensor], Tensor]) -> Tensor:
        signals = {name: place(signal) for name, signal in SIGNALS.items()}
        on_place = View(Site("vision"), place(TOKENS), place(GRID), signals)
        return IDPruner(mmr_lambda).plan(on_place, keep).kept.cpu()

    with SimulatedCards():
        on_card = plan(ON_CARD)
    assert on_card.equal(plan(torch.clone))


@pytest.mark.sampled
@pytest.mark.parametrize("n_crops", [1, 4])
@pytest.mark.parametrize("keep", [1, 5, 40, 120])
def test_a_covering_on_a_card_is_that_of_the_host(keep: int, n_crops: int) -> None:
    signals = {**SIGNALS, "tile": torch.arange(120).expand(2, -1) * n_crops // 120}

    def plan(place: Callable[[Tensor], Tensor]) -> Tensor:
        on_place = {name: place(signal) for name, signal in signals.items()}
        view = View(Site("vision"), place(TOKENS), place(GRID), on_place)
        return SCOPE().plan(view, keep).kept.cpu()

    with SimulatedCards():
        on_card = plan(ON_CARD)
    assert on_card.equal(plan(torch.clone))


@pytest.mark.parametrize("count", [0, 1, 7, 120])
def test_places_on_a_card_are_those_of_the_host(count: int) -> None:
    grid = torch.cat([GRID[:1], GRID[1:].flip(1)])
    with SimulatedCards():
        on_card = farthest_places(ON_CARD(grid), count).cpu()
    assert on_card.equal(farthest_places(grid, count))


@pytest.mark.sampled
@pytest.mark.parametrize("pivots", [0, 1, 10])
@pytest.mark.parametrize("width", [0.0, 0.01, 0.2, 2.0])
@pytest.mark.parametrize("keep", [10, 11, 60, 120])
def test_independent_picks_on_a_card_are_those_of_the_host(
    keep: int, width: float, pivots: int
) -> None:
    """Also where the pool is empty before all are found."""
    near = (SCORES.unsqueeze(2) - SCORES.unsqueeze(1)).abs() < width
    kept = independent_set(SCORES, Within(near), keep, pivots)
    with SimulatedCards():
        graph = Within(ON_CARD(near))
        on_card = independent_set(ON_CARD(SCORES), graph, keep, pivots)
        pairs = [(part.cpu(), on_host) for part, on_host in zip(on_card, kept, strict=True)]
    for part, on_host in pairs:
        assert part.equal(on_host)


def kernels_of_a_step(decode: DecodeLoop) -> float:
    with SimulatedCards() as cards, torch.no_grad():
        model, counts = spread(adapter_of("llava"), *PLACEMENTS["one"]), [0]
        with model.open_adapter() as adapter:
            inputs = adapter.encode(list(FAMILIES["llava"].chats[:1]))
            with Session(adapter, NoReduction(), Budget("kept", 0.0), decode=decode) as session:
                for tokens in (4, 12):
                    session.generate(inputs, max_new_tokens=tokens)
                    counts.append(cards.kernels - sum(counts))
    return (counts[2] - counts[1]) / 8


@pytest.mark.slow
def test_a_step_launches_no_more_kernels_than_the_library() -> None:
    assert kernels_of_a_step("loop") <= kernels_of_a_step("generate")
