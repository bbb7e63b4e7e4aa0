"""Optimal transport with dustbins: published numbers, equality with the logarithmic form, and inputs at the edge."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from espalier.methods.select.sinkhorn import transport

SCORES = torch.tensor([[[1.0, 0.0], [0.0, 0.5], [-0.5, 0.2]]])


def logarithmic(scores: list[list[float]], z: float, iters: int) -> list[list[float]]:
    """The whole plan, dustbins included, by the updates of the duals u and v as printed: sums of exponentials, fp64."""
    m, j = len(scores), len(scores[0])
    n = m + j
    bar = [[*row, z] for row in scores] + [[z] * (j + 1)]
    log_mu = [-math.log(n)] * m + [math.log(j) - math.log(n)]
    log_nu = [-math.log(n)] * j + [math.log(m) - math.log(n)]
    u, v = [0.0] * (m + 1), [0.0] * (j + 1)
    for _ in range(iters):
        for i in range(m + 1):
            u[i] = log_mu[i] - math.log(sum(math.exp(bar[i][k] + v[k]) for k in range(j + 1)))
        for k in range(j + 1):
            v[k] = log_nu[k] - math.log(sum(math.exp(bar[i][k] + u[i]) for i in range(m + 1)))
    return [
        [math.exp(bar[i][k] + u[i] + v[k] + math.log(n)) for k in range(j + 1)]
        for i in range(m + 1)
    ]


def test_worked_examples() -> None:
    plan = transport(SCORES, 0.2, 100)[0]
    wanted = [[0.356846, 0.133875], [0.152420, 0.256274], [0.105823, 0.217320]]
    assert torch.allclose(plan, torch.tensor(wanted), atol=1e-6)
    # What is missing to 1 lies in the dustbins.
    assert torch.allclose(1 - plan.sum(1), torch.tensor([0.509279, 0.591306, 0.676857]), atol=2e-6)
    assert torch.allclose(1 - plan.sum(0), torch.tensor([0.384910, 0.392531]), atol=2e-6)
    masses = transport(torch.tensor([[[1.0], [0.0]]]), 0.2, 100)[0, :, 0]
    assert torch.allclose(masses, torch.tensor([0.469644, 0.245719]), atol=1e-6)


@pytest.mark.parametrize("iters", [1, 2, 7, 100])
@pytest.mark.parametrize(("m", "j"), [(1, 1), (1, 6), (5, 1), (4, 7)])
def test_every_iterate_is_that_of_the_logarithmic_form(m: int, j: int, iters: int) -> None:
    generator = torch.Generator().manual_seed(m + 10 * j)
    scores = torch.rand(2, m, j, dtype=torch.float64, generator=generator) * 2 - 1
    plan = transport(scores, 0.2, iters)
    assert plan.dtype == torch.float64
    for row in range(2):
        whole = torch.tensor(logarithmic(scores[row].tolist(), 0.2, iters), dtype=torch.float64)
        assert (plan[row] - whole[:-1, :-1]).abs().max() < 1e-13


@pytest.mark.parametrize("z", [-10.0, 0.2, 10.0])
@pytest.mark.parametrize(
    "scores",
    [torch.ones(1, 4, 6), torch.zeros(1, 4, 6), -torch.ones(1, 1, 9), torch.ones(1, 9, 1)],
    ids=["identical", "zero vectors", "one kept", "one dropped"],
)
def test_degenerate_scores_give_finite_plans(scores: Tensor, z: float) -> None:
    plan = transport(scores, z, 100)
    assert torch.isfinite(plan).all()
    assert (plan >= 0).all()
    assert (plan.sum(1) <= 1 + 1e-5).all()
    assert (plan.sum(2) <= 1 + 1e-5).all()
    # All scores are equal, and so are all shares.
    assert (plan - plan[0, 0, 0]).abs().max() < 1e-6


def test_nothing_to_give_is_nothing() -> None:
    assert transport(torch.zeros(2, 5, 0), 0.2, 100).shape == (2, 5, 0)


def test_a_large_plan_keeps_its_sums_in_single_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.nn.functional.normalize(torch.randn(1, 2880, 8, generator=generator), dim=2)
    scores = tokens[:, :2160] @ tokens[:, 2160:].transpose(1, 2)
    plan = transport(scores, 0.2, 100)
    exact = transport(scores.double(), 0.2, 100)
    assert (plan - exact).abs().max() < 1e-5 * exact.max()
    assert (plan.sum(1) < 1).all()
    assert (plan.sum(2) < 1).all()
