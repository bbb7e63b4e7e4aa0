"""D3ToM's choice and merging against its equations written out token by token, and the shares of D3ToM-t."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch

from espalier.methods.base import Site, View
from espalier.methods.d3tom import D3ToM
from espalier.methods.d3tom_t import D3ToMT
from espalier.methods.select.merge import nearest_kept
from tests.methods.twins import best, check_method


def view_of(scores, states, normed=None) -> View:
    tokens = torch.as_tensor(states, dtype=torch.float64)[None]
    signals = {"decider_attention": torch.as_tensor(scores, dtype=torch.float64)[None]}
    if normed is not None:
        signals["layer_normed"] = torch.as_tensor(normed, dtype=torch.float64)[None]
    grid = torch.zeros(1, tokens.shape[1], 4, dtype=torch.long)
    return View(Site("block", 3), tokens, grid, signals, step=1)


def merged(method: D3ToM, view: View, keep: int) -> tuple[list[int], torch.Tensor]:
    plan = method.answer(view, keep)
    return plan.kept[0].tolist(), plan.merge.apply(view.tokens, keep)[0]


def slow_d3tom(method: D3ToM, view: View, row: int, keep: int) -> dict[int, torch.Tensor]:
    """Equations (7), (9) and (10), one token after the other."""
    scores, states = view.signals["decider_attention"][row].tolist(), view.tokens[row]
    normed = method.similarity == "normed"
    compared = (view.signals["layer_normed"][row] if normed else states).tolist()
    kept = best(scores, keep)

    def cosine(a, b):
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    groups = {j: [j] for j in kept}
    for i in range(len(scores)):
        if i not in groups:
            groups[max(kept, key=lambda j: (cosine(compared[i], compared[j]), -j))].append(i)
    mean = method.merging == "mean"
    return {
        j: states[some].mean(dim=0) if mean else states[some].sum(dim=0)
        for j, some in groups.items()
    }


def random_view(_method: D3ToM, _keep: int, seed: int) -> View:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(9, generator=generator, dtype=torch.float64).mul(4).round().div(4)
    return view_of(scores, *torch.randn(2, 9, 5, generator=generator, dtype=torch.float64))


test_d3tom = check_method(
    "d3tom",
    slow_d3tom,
    settings=[
        {"merging": merging, "similarity": similarity}
        for merging in ("sum", "mean")
        for similarity in ("attended", "normed")
    ],
    views=random_view,
    varied=range(4),
    keeps=(1, 3, 9),
    atol=1e-9,
)

test_d3tom_t = check_method(
    "d3tom_t", slow_d3tom, views=random_view, varied=range(4), keeps=(1, 3, 9), atol=1e-9
)


@pytest.mark.parametrize(("merging", "last"), [("sum", (3.1, 1.9)), ("mean", (0.775, 0.475))])
def test_a_worked_example(merging, last) -> None:
    """Two deciders and five tokens: 0, 2 and 4 all go to 3."""
    rows = torch.tensor([(0.3, 0.25, 0.2, 0.15, 0.1), (0.1, 0.4, 0.05, 0.3, 0.15)])
    states = [(1.0, 0.0), (0.0, 1.0), (0.9, 0.1), (0.2, 0.8), (1.0, 1.0)]
    kept, values = merged(D3ToM(merging=merging), view_of(rows.sum(0), states), 2)
    assert kept == [1, 3]
    torch.testing.assert_close(values, torch.tensor([(0.0, 1.0), last], dtype=torch.float64))


def test_kept_copies_stay_and_halves_are_compared_in_fp32() -> None:
    assert nearest_kept(torch.ones(1, 3, 2), torch.tensor([[0, 2]])).tolist() == [[0, 0, 1]]
    states = torch.randn(1, 300, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = torch.arange(0, 300, 3)[None]
    assert torch.equal(nearest_kept(states, kept), nearest_kept(states.float(), kept))


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("direction", ["low_to_high", "high_to_low"])
def test_the_shares_of_d3tom_t_have_the_ratio_as_their_mean(ratio, direction) -> None:
    first, *rest = D3ToMT(direction=direction).ratios(ratio, 32)
    assert first == 0
    assert (len(rest), fmean(rest)) == (31, pytest.approx(ratio, abs=1e-12))
    assert {round(min(rest), 9), round(max(rest), 9)} == {
        round(max(0.0, 2 * ratio - 1), 9),
        round(min(1.0, 2 * ratio), 9),
    }
    ascending = direction == "low_to_high"
    assert rest == sorted(rest, reverse=not ascending)


def test_positions_close_up_after_the_site() -> None:
    assert D3ToM().positions(6) == "renumbered"
