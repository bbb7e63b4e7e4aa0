"""PyramidDrop at denoising steps: where its stages end, and what a ratio means to them."""

from __future__ import annotations

import pytest
import torch

from methods.base import MethodError, Need, Site, View
from methods.pyramiddrop_denoising import PyramidDropDenoising


@pytest.mark.parametrize(
    ("depth", "S", "layers"), [(32, 4, [8, 16, 24]), (6, 4, [1, 3, 4]), (32, 2, [16])]
)
def test_stages_are_equally_long(depth, S, layers) -> None:
    sites = PyramidDropDenoising(S).sites(depth)
    assert sites == tuple(Site("layer", layer) for layer in layers)
    assert PyramidDropDenoising(S).needs(sites[0]) == (Need("last_attention"),)


@pytest.mark.parametrize("ratio", [0.5, 0.667, 0.75, 0.833, 0.9])
def test_each_stage_keeps_one_and_a_half_times_what_the_ratio_leaves(ratio) -> None:
    """The appendix: N, 1.5 (1 - r) N, the same share of that, and again."""
    method, share = PyramidDropDenoising(), 1.5 * (1 - ratio)
    (gone,) = set(method.ratios(ratio, 8))
    assert gone == pytest.approx(1 - share**3)
    assert method.fractions(1 - gone, 3) == pytest.approx((share, share**2, share**3))
    assert len(method.ratios(ratio, 8)) == 8  # the first step is one of them


def test_another_excess_and_number_of_stages() -> None:
    assert PyramidDropDenoising(S=3, excess=1.0).ratios(0.5, 2) == pytest.approx((0.75, 0.75))


@pytest.mark.parametrize(
    ("excess", "ratio", "least"), [(1.5, 0.3, "0.3333"), (1.5, 1 / 3, "0.3333"), (2.0, 0.5, "0.5")]
)
def test_a_stage_that_would_not_shrink_is_refused(excess, ratio, least) -> None:
    with pytest.raises(MethodError, match=f"or {least} < ratio < 1"):
        PyramidDropDenoising(excess=excess).ratios(ratio, 4)


def test_ratio_0_drops_nothing_whatever_the_excess() -> None:
    assert PyramidDropDenoising().ratios(0.0, 3) == (0.0, 0.0, 0.0)


def test_a_worked_example() -> None:
    view = View(
        Site("layer", 8),
        torch.zeros(1, 4, 2),
        torch.zeros(1, 4, 4, dtype=torch.long),
        {"last_attention": torch.tensor([[0.1, 0.4, 0.4, 0.2]])},
    )
    assert PyramidDropDenoising().answer(view, 2).kept.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: PyramidDropDenoising(S=1), "method.params.S=1"),
        (lambda: PyramidDropDenoising(excess=0.0), "method.params.excess=0.0"),
        (lambda: PyramidDropDenoising(S=7).sites(6), "method.params.S=7 is out of range"),
    ],
)
def test_what_cannot_be_is_one_line(build, line) -> None:
    with pytest.raises(MethodError) as told:
        build()
    assert line in str(told.value)
