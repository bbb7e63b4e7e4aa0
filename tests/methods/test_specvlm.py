"""SpecVLM's attention-guided pruning against a slow reference, its two stages one by one, and in the engine."""

from __future__ import annotations

import pytest
import torch

from espalier.methods.base import View
from espalier.methods.specvlm import SpecVLM, covering, spread
from tests.methods.cases import SQUARE, make_view, replaced
from tests.methods.slow import two_stages
from tests.methods.twins import check_method


def slow_specvlm(method: SpecVLM, view: View, row: int, keep: int) -> list[int]:
    layers = range(method.layer) if method.guidance == "layers" else [method.layer - 1]
    return two_stages(view, row, keep, layers, method.mass)


def uneven(view: View) -> View:
    """The same view with attention that differs much from token to token, and one row with two words fewer."""
    signals = {
        key: value**6 if key.startswith("text_attention") else value.clone()
        for key, value in view.signals.items()
    }
    signals["text_positions"][1, -2:] = -1
    for key, value in signals.items():
        if key.startswith("text_attention"):
            value[1, -2:] = 0.0
    return replaced(view, **signals)


test_specvlm = check_method(
    "specvlm",
    slow_specvlm,
    settings=({}, {"guidance": "last", "layer": 3, "mass": 0.8}, {"mass": 0.0}, {"mass": 1.0}),
    views=lambda method, keep: uneven(make_view(method, SQUARE * 3, seed=keep)),
    keeps=(1, 2, 5, 20, 70, 143, 144),
)


# ---------------------------------------------------------------- the two stages


def test_the_fewest_that_cover_the_mass():
    scores = torch.tensor([[1.0, 4.0, 1.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    # 4 of 10 is two fifths exactly: one token does. Of equal ones two do, the first two.
    assert covering(scores, 0.4, 5).tolist() == [
        [False, True, False, False, False],
        [True, True, False, False, False],
    ]
    assert covering(scores, 0.41, 5)[0].tolist() == [False, True, False, True, False]
    assert covering(scores, 0.9, 1).sum(dim=1).tolist() == [1, 1]
    assert not covering(scores, 0.0, 5).any()
    assert not covering(torch.zeros(1, 4), 0.4, 4).any()


@pytest.mark.parametrize("keep", [1, 2, 3, 7, 30, 59, 60])
def test_the_rest_is_spread_evenly_from_the_first_to_the_last(keep: int):
    free = torch.ones(3, 60, dtype=torch.bool)
    free[1, ::7] = False
    free[2, :30] = False
    for row, taken in enumerate(spread(free, keep)):
        left = free[row].nonzero().flatten()
        missing = max(0, keep - (60 - len(left)))
        places = [p * (len(left) - 1) // max(1, missing - 1) for p in range(missing)]
        assert taken.nonzero().flatten().tolist() == [int(left[place]) for place in places]
        if missing > 1:
            assert {int(left[0]), int(left[-1])} <= set(taken.nonzero().flatten().tolist())
