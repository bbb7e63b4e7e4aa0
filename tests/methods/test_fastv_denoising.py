"""FastV at denoising steps: whose attention ranks, and what goes at which step."""

from __future__ import annotations

import pytest
import torch

from methods.base import MethodError, Need, Site, View
from methods.fastv_denoising import FastVDenoising


@pytest.mark.parametrize(
    ("queries", "signal"),
    [
        ("deciders", "decider_attention"),
        ("last", "last_attention"),
        ("mean", "mean_attention"),
    ],
)
def test_the_layer_below_the_site_ranks(queries, signal) -> None:
    method = FastVDenoising(K=4, queries=queries)
    (site,) = method.sites(32)
    assert site == Site("layer", 4)
    assert method.needs(site) == (Need(signal, 3),)


def test_a_worked_example() -> None:
    """The three highest of six, the lower index of equals, in their order."""
    scores = torch.tensor([[0.1, 0.3, 0.2, 0.3, 0.0, 0.2]])
    view = View(
        Site("layer", 3),
        torch.zeros(1, 6, 2),
        torch.zeros(1, 6, 4, dtype=torch.long),
        {"decider_attention@2": scores},
        step=1,
    )
    plan = FastVDenoising().answer(view, 3)
    assert plan.kept.tolist() == [[1, 2, 3]]
    assert plan.merge is None


def test_the_first_step_is_whole() -> None:
    assert FastVDenoising().ratios(0.75, 4) == (0.0, 0.75, 0.75, 0.75)


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: FastVDenoising(K=0), "method.params.K=0"),
        (lambda: FastVDenoising(queries="all"), "method.params.queries='all'"),
        (lambda: FastVDenoising(K=6).sites(6), "method.params.K=6 is out of range; valid: 1 to 5"),
    ],
)
def test_what_cannot_be_is_one_line(build, line) -> None:
    with pytest.raises(MethodError) as told:
        build()
    assert line in str(told.value)
