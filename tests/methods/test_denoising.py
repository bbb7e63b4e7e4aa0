"""FastV, PyramidDrop and RedVTP at denoising steps: where they act, what ranks, and what a ratio means to them."""

from __future__ import annotations

import pytest
import torch

from espalier.methods.base import MethodError, Need, Site, View
from espalier.methods.fastv_denoising import FastVDenoising
from espalier.methods.fastv_first_step import FastVFirstStep
from espalier.methods.pyramiddrop_denoising import PyramidDropDenoising
from espalier.methods.redvtp import RedVTP


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


def test_an_example_worked_out_for_fastv() -> None:
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


def test_fastv_of_the_first_step_acts_in_half_of_the_depth_and_then_before_the_decoder() -> None:
    method = FastVFirstStep(queries="mean")
    prefix, layer = method.sites(32)
    assert (prefix, layer) == (Site("prefix"), Site("layer", 16))
    assert method.needs(prefix) == (Need("first_kept"),)
    assert method.needs(layer) == (Need("mean_attention"),)
    assert method.ratios(0.75, 3) == (0.75, 0.75, 0.75)
    assert method.even
    assert FastVFirstStep(K=3).sites(32)[1] == Site("layer", 3)


def view_of(site: Site, signal: str, scores: list[float], step: int) -> View:
    n = len(scores)
    grid = torch.zeros(1, n, 4, dtype=torch.long)
    return View(site, torch.zeros(1, n, 2), grid, {signal: torch.tensor([scores])}, step=step)


def test_an_example_worked_out_for_the_first_step() -> None:
    """Layer 1 keeps the two highest of four; the second step keeps the same before the decoder."""
    method = FastVFirstStep(K=1)
    first = method.answer(view_of(Site("layer", 1), "last_attention", [0.1, 0.4, 0.4, 0.2], 0), 2)
    assert first.kept.tolist() == [[1, 2]]
    kept = [0.0, 1.0, 1.0, 0.0]
    assert method.answer(view_of(Site("prefix"), "first_kept", kept, 1), 2).kept.tolist() == [
        [1, 2]
    ]
    whole = method.answer(view_of(Site("prefix"), "first_kept", [0.0] * 4, 0), 4)
    assert whole.kept.tolist() == [[0, 1, 2, 3]]


def test_an_example_worked_out_for_masked_tokens() -> None:
    """Two masked tokens pay (0.1, 0.5, 0.2) and (0.3, 0.1, 0.2): the means are 0.2, 0.3, 0.2."""
    means = torch.tensor([[0.1, 0.5, 0.2], [0.3, 0.1, 0.2]]).mean(0).tolist()
    view = view_of(Site("prefix"), "masked_attention", means, 1)
    assert RedVTP().answer(view, 1).kept.tolist() == [[1]]
    assert RedVTP().ratios(0.75, 3) == (0.0, 0.75, 0.75)
    assert RedVTP().rounds_down
    assert RedVTP().takes_newlines


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


def test_an_example_worked_out_for_a_stage() -> None:
    view = View(
        Site("layer", 8),
        torch.zeros(1, 4, 2),
        torch.zeros(1, 4, 4, dtype=torch.long),
        {"last_attention": torch.tensor([[0.1, 0.4, 0.4, 0.2]])},
    )
    assert PyramidDropDenoising().answer(view, 2).kept.tolist() == [[1, 2]]
