"""EVS against a slow version, by hand, on models, and against what vLLM's code keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from espalier.harness.specs.comparable import grouped
from espalier.methods.base import MethodError, View
from espalier.methods.evs import EVS
from tests.methods.cases import PREFIX, VIDEOS, grid_of
from tests.methods.released import case_video, numbers, released_video
from tests.methods.twins import check_method


def slow_evs(_method: EVS, view: View, row: int, keep: int) -> list[int]:
    """Token by token: the tokens of a first frame, then the most changed ones."""
    frames = grouped((frame, token) for token, frame in enumerate(view.grid[row, :, 0].tolist()))
    change: dict[int, float] = {}
    for number, tokens in frames.items():
        earlier = frames.get(number - 1, [])
        for place, token in enumerate(tokens):
            change[token] = 255.0
            if len(earlier) == len(tokens):
                pair = view.tokens[row, [token, earlier[place]]].double()
                change[token] = 1 - float(cosine_similarity(*pair, dim=0))
    return sorted(sorted(change, key=lambda token: (-change[token], token))[:keep])


test_evs = check_method(
    "evs",
    slow_evs,
    views=lambda _method, _keep: View(
        PREFIX, numbers(5, 3, 48, 7), torch.stack([grid_of(tiling) for tiling in VIDEOS])
    ),
    keeps=(9, 20, 47, 48),
    released=lambda case: case_video(case, PREFIX),
)


def test_changes_by_hand() -> None:
    """Frame 0 stays; then tokens 5 (turned round), 3 (turned by 90 degrees), 2, 4 (the same; the earlier first)."""
    tokens = torch.tensor([[[1.0, 0], [0, 1]], [[2, 0], [1, 0]], [[2, 0], [-1, 0]]])
    view = released_video(PREFIX, tokens, 2)
    for keep, kept in ((2, [0, 1]), (3, [0, 1, 5]), (4, [0, 1, 3, 5]), (5, [0, 1, 2, 3, 5])):
        assert EVS().plan(view, keep).kept.tolist() == [kept]


@pytest.mark.parametrize(
    ("tiling", "keep", "line"),
    [
        (VIDEOS[0], 2, "hold 3; valid: 3 to 48 (ratio 0 to 0.9375)"),
        (VIDEOS[2], 8, "hold 9; valid: 9 to 48 (ratio 0 to 0.8125)"),
        (((0, 0, 6, 8),), 47, "hold 48; valid: 48 to 48 (ratio 0 to 0)"),
    ],
    ids=["video", "two videos", "picture"],
)
def test_a_budget_below_the_first_frames_is_refused(tiling: Any, keep: int, line: str) -> None:
    view = View(PREFIX, torch.ones(1, 48, 2), grid_of(tiling)[None])
    with pytest.raises(MethodError) as error:
        EVS().plan(view, keep)
    assert str(error.value).endswith(line)
