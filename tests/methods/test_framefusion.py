"""FrameFusion against a slow version, by hand, on models, and against what its released code keeps and merges."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.base import Site, View
from espalier.methods.framefusion import FrameFusion
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.cases import PREFIX, VIDEOS, grid_of
from tests.methods.released import case_video, numbers, released_video, shares
from tests.methods.runs import kept_by
from tests.methods.twins import at_stage, check_kept, check_method, outcome, slow_highest


def slow_framefusion(method: FrameFusion, view: View, _row: int, keep: int) -> dict[int, Tensor]:
    """Place by place and frame by frame, over lists: what stands at each kept token."""
    tokens, places = view.tokens[0].double(), view.grid[0].tolist()
    order = sorted(range(len(tokens)), key=lambda i: (places[i][1:], i))
    alike = {}
    for before, token in pairwise(order):
        same = places[before][1:] == places[token][1:]
        alike[token] = (
            float(cosine_similarity(tokens[before], tokens[token], dim=0)) if same else -2
        )
    likest = sorted(alike, key=lambda token: (-alike[token], order.index(token)))
    merging = [token for token in likest if alike[token] >= method.S][: len(tokens) - keep]
    runs: list[list[int]] = []
    for token in order:
        if token in merging:
            runs[-1].append(token)
        else:
            runs.append([token])
    return {run[0]: tokens[run].mean(dim=0) for run in runs}


def test_three_frames_by_hand() -> None:
    """Place 0 has cosines 1 and 0.6 from frame to frame, place 1 has 0 and 0.8."""
    tokens = torch.tensor([[[1.0, 0], [0, 2]], [[3, 0], [1, 0]], [[3, 4], [4, 3]]])
    view = released_video(PREFIX, tokens, 2)
    # All but the cosine of 0: a run of three, and one of two.
    plan = FrameFusion(S=0.55).plan(view, 1)
    assert plan.kept.tolist() == [[0, 1, 3]]
    assert outcome(view, plan)[0].tolist() == [
        [pytest.approx(7 / 3), pytest.approx(4 / 3)],
        [0, 2],
        [2.5, 1.5],
    ]
    check_kept(
        view,
        (FrameFusion(S=0.55), 4, [0, 1, 3, 4]),  # two pairs, the likest
        (FrameFusion(S=0.9), 1, [0, 1, 3, 4, 5]),
        (FrameFusion(S=-2.0), 2, [0, 1]),
    )
    # Frame 1 is gone: place 0 is compared with frame 0.
    left = View(Site("layer", 1), view.tokens[:, [0, 1, 4, 5]], view.grid[:, [0, 1, 4, 5]])
    assert FrameFusion(S=0.59, K=3).plan(left, 1).kept.tolist() == [[0, 1]]


def released_framefusion(case: dict[str, Any]) -> None:
    method = FrameFusion(**case["params"])
    view = case_video(case, PREFIX)
    origin = torch.arange(view.tokens.shape[1])
    for step, count in enumerate(case["counts"]):
        site = Site("layer", step) if step else PREFIX
        attention = shares(case["seed"] + step, 1, view.tokens.shape[1])
        view = View(site, view.tokens, view.grid, {"last_attention": attention})
        plan = method.plan(view, case["counts"][-1])
        assert plan.kept.shape[1] == count
        tokens, origin = outcome(view, plan), origin[plan.kept[0]]
        view = View(site, tokens, view.grid[:, plan.kept[0]])
    assert origin.tolist() == case["kept"]
    assert view.tokens[0].double().sum(dim=1).tolist() == pytest.approx(case["sums"], abs=2e-4)


test_framefusion = check_method(
    "framefusion",
    slow_framefusion,
    settings=({"S": -2.0}, {"S": 0.0}, {"S": 0.5}),
    views=lambda _method, keep, number: View(
        PREFIX, numbers(keep, 1, 48, 5), grid_of(VIDEOS[number]).unsqueeze(0)
    ),
    varied=range(len(VIDEOS)),
    keeps=(1, 7, 30, 47, 48),
    atol=1e-6,
    released=released_framefusion,
)

test_framefusion_last_site = check_method(
    "framefusion", partial(slow_highest, "last_attention"), views=at_stage, varied=(2,), keeps=(20,)
)


def test_the_last_count_is_the_budgets_whatever_has_merged() -> None:
    adapter, chats = adapter_of("onevision_video"), list(FAMILIES["onevision_video"].chats)
    for threshold in (0.2, 0.99):
        done = kept_by(adapter, FrameFusion(S=threshold), chats, 0.6)
        exact = kept_by(adapter, FrameFusion(S=-2.0), chats, 0.6)
        for record, wanted in zip(done.records, exact.records, strict=True):
            assert record.kept[-1] == wanted.kept[-1]
            assert record.visual >= record.kept[0] >= record.kept[1] >= record.kept[-1]
