"""The paper's count of a denoising run; every figure of its Tables 2 and 5 is in tests/tables/test_analytic.py."""

from __future__ import annotations

import pytest

from espalier.methods.d3tom import D3ToM
from espalier.methods.d3tom_t import D3ToMT
from lab.analytic.denoising_cost import DenoisingCost, even, rising

#: LLaDA-8B, 64 tokens in 32 steps; sizes that the paper does not print are those that all its figures fit.
PAPER = DenoisingCost(4096, 12288, 32, 32, 1000, 128)


@pytest.mark.parametrize("ratio", [0.5, 0.667, 0.9])
def test_the_papers_shares_are_those_that_the_methods_take(ratio: float) -> None:
    assert even(ratio, 32) == pytest.approx(D3ToM().ratios(ratio, 32))
    assert rising(ratio, 32) == pytest.approx(D3ToMT().ratios(ratio, 32))
    assert sum(rising(ratio, 32)) == pytest.approx(31 * ratio)


def test_rising_shares_cost_what_equation_18_says() -> None:
    difference = PAPER.merging(rising(0.5, 32), 3) - PAPER.merging(even(0.5, 32), 3)
    spread = sum((share - 0.5) ** 2 for share in rising(0.5, 32)[1:])
    assert spread == pytest.approx(31 * 32 / (12 * 30))
    assert difference == pytest.approx(2 * 4096 * (32 - 3 - 2) * 1000**2 * spread)
    assert difference / 1e12 == pytest.approx(0.610, abs=1e-3)


def test_a_merging_step_without_a_share_is_a_whole_one() -> None:
    assert PAPER.merging((0.0,) * 32, 3) == PAPER.unreduced()
    assert PAPER.pruning(0.0, 3) == PAPER.before(0.0) == PAPER.unreduced()
