"""FastV, PyramidDrop and RedVTP at denoising steps: where they act, what ranks, and what a ratio means to them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from espalier.methods.base import MethodError, Site, View
from espalier.methods.d3tom import D3ToM
from espalier.methods.d3tom_t import D3ToMT
from espalier.methods.fastv_denoising import FastVDenoising
from espalier.methods.fastv_first_step import FastVFirstStep
from espalier.methods.pyramiddrop_denoising import PyramidDropDenoising
from espalier.methods.redvtp import RedVTP
from tests.methods.twins import at_stage, check_method, slow_highest


def view_of(site: Site, signal: str, scores: list[float], step: int) -> View:
    n = len(scores)
    grid = torch.zeros(1, n, 4, dtype=torch.long)
    return View(site, torch.zeros(1, n, 2), grid, {signal: torch.tensor([scores])}, step=step)


QUERIES = {
    "deciders": "decider_attention@2",
    "last": "last_attention@2",
    "mean": "mean_attention@2",
}

test_fastv_denoising = check_method(
    "fastv_denoising",
    partial(slow_highest, lambda method: QUERIES[method.queries]),
    settings=[{"queries": queries} for queries in QUERIES],
    keeps=(1, 20, 47),
)

test_fastv_first_step = check_method(
    "fastv_first_step",
    partial(slow_highest, "last_attention"),
    views=at_stage,
    varied=(1,),
    keeps=(1, 20, 47),
)

test_fastv_later_steps = check_method(
    "fastv_first_step",
    partial(slow_highest, "first_kept"),
    views=at_stage,
    varied=(0,),
    keeps=(1, 20, 47),
)

test_pyramiddrop_denoising = check_method(
    "pyramiddrop_denoising", partial(slow_highest, "last_attention"), keeps=(1, 20, 47)
)

test_redvtp = check_method("redvtp", partial(slow_highest, "masked_attention"), keeps=(1, 20, 47))


def test_an_example_worked_out_for_fastv() -> None:
    """The three highest of six, the lower index of equals, in their order."""
    scores = [0.1, 0.3, 0.2, 0.3, 0.0, 0.2]
    plan = FastVDenoising().answer(view_of(Site("layer", 3), "decider_attention@2", scores, 1), 3)
    assert (plan.kept.tolist(), plan.merge) == ([[1, 2, 3]], None)


def test_fastv_of_the_first_step_acts_in_half_of_the_depth_and_then_before_the_decoder() -> None:
    method = FastVFirstStep(queries="mean")
    prefix, layer = method.sites(32)
    assert (prefix, layer) == (Site("prefix"), Site("layer", 16))
    assert method.even
    assert FastVFirstStep(K=3).sites(32)[1] == Site("layer", 3)


def test_an_example_worked_out_for_the_first_step() -> None:
    """Layer 1 keeps the two highest of four; the second step keeps the same before the decoder."""
    method = FastVFirstStep(K=1)
    first = method.answer(view_of(Site("layer", 1), "last_attention", [0.1, 0.4, 0.4, 0.2], 0), 2)
    assert first.kept.tolist() == [[1, 2]]
    assert method.answer(
        view_of(Site("prefix"), "first_kept", [0.0, 1.0, 1.0, 0.0], 1), 2
    ).kept.tolist() == [[1, 2]]
    whole = method.answer(view_of(Site("prefix"), "first_kept", [0.0] * 4, 0), 4)
    assert whole.kept.tolist() == [[0, 1, 2, 3]]


def test_an_example_worked_out_for_masked_tokens() -> None:
    """Two masked tokens pay (0.1, 0.5, 0.2) and (0.3, 0.1, 0.2): the means are 0.2, 0.3, 0.2."""
    means = torch.tensor([[0.1, 0.5, 0.2], [0.3, 0.1, 0.2]]).mean(0).tolist()
    view = view_of(Site("prefix"), "masked_attention", means, 1)
    assert RedVTP().answer(view, 1).kept.tolist() == [[1]]
    assert RedVTP().rounds_down
    assert RedVTP().takes_newlines


@pytest.mark.parametrize(
    ("method", "ratio", "ratios"),
    [
        (D3ToM(), 0.75, (0.0, 0.75, 0.75, 0.75)),
        (D3ToM(), 0.75, (0.0,)),
        (D3ToM(), 0.0, (0.0,) * 8),
        (D3ToMT(), 0.75, (0.0, 0.75)),  # too few steps for a slope
        (D3ToMT(), 0.75, (0.0, 0.5, 1.0)),
        (D3ToMT(), 0.0, (0.0,) * 8),
        # The released shares fall, and miss the mean.
        (D3ToMT(direction="released"), 0.8, (0.0, *(0.6 + 0.4 * (1 - t / 4) for t in (1, 2, 3)))),
        (D3ToMT(direction="released"), 0.0, (0.0,) * 8),
        (FastVDenoising(), 0.75, (0.0, 0.75, 0.75, 0.75)),
        (FastVFirstStep(queries="mean"), 0.75, (0.75, 0.75, 0.75)),
        (PyramidDropDenoising(), 0.0, (0.0, 0.0, 0.0)),
        (PyramidDropDenoising(S=3, excess=1.0), 0.5, (0.75, 0.75)),
        (RedVTP(), 0.75, (0.0, 0.75, 0.75)),
    ],
    ids=str,
)
def test_steps_have_these_ratios(method, ratio, ratios) -> None:
    assert method.ratios(ratio, len(ratios)) == pytest.approx(ratios)


@pytest.mark.parametrize("ratio", [0.5, 0.667, 0.75, 0.833, 0.9])
def test_each_stage_keeps_one_and_a_half_times_what_the_ratio_leaves(ratio) -> None:
    """The appendix: N, 1.5 (1 - r) N, the same share of that, and again."""
    method, share = PyramidDropDenoising(), 1.5 * (1 - ratio)
    (gone,) = set(method.ratios(ratio, 8))
    assert gone == pytest.approx(1 - share**3)
    assert method.fractions(1 - gone, 3) == pytest.approx((share, share**2, share**3))
    assert len(method.ratios(ratio, 8)) == 8  # the first step is one of them


@pytest.mark.parametrize(
    ("excess", "ratio", "least"), [(1.5, 0.3, "0.3333"), (1.5, 1 / 3, "0.3333"), (2.0, 0.5, "0.5")]
)
def test_a_stage_that_would_not_shrink_is_refused(excess, ratio, least) -> None:
    with pytest.raises(MethodError, match=f"or {least} < ratio < 1"):
        PyramidDropDenoising(excess=excess).ratios(ratio, 4)


def test_an_example_worked_out_for_a_stage() -> None:
    view = view_of(Site("layer", 8), "last_attention", [0.1, 0.4, 0.4, 0.2], 0)
    assert PyramidDropDenoising().answer(view, 2).kept.tolist() == [[1, 2]]
