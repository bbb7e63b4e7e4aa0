"""PixelPrune: errors against loops, a picture by hand, what its released code keeps, and pixels inside the tower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.methods.base import Need, Site, View
from espalier.methods.pixelprune import UNPREDICTED, PixelPrune
from tests.family_runs import adapter_of, shown
from tests.methods.cases import make_view
from tests.methods.released import numbers, released_view
from tests.methods.towers import chats_of
from tests.methods.twins import best, check_method

SITE = Site("tower", -1)


def slow_errors(patches: dict[tuple[int, int], list[float]], tau: float) -> dict[tuple, float]:
    """Errors of one picture, place by place."""

    def difference(first: list[float], second: list[float]) -> float:
        return max(abs(x - y) for x, y in zip(first, second, strict=True))

    errors = {}
    for row, column in patches:
        left, above, corner = (
            patches.get(place)
            for place in ((row, column - 1), (row - 1, column), (row - 1, column - 1))
        )
        predictor = left or above
        if (
            left
            and above
            and corner
            and difference(corner, left) <= tau < difference(corner, above)
        ):
            predictor = above
        patch = patches[row, column]
        errors[row, column] = UNPREDICTED if predictor is None else difference(patch, predictor)
    return errors


def with_gaps(method: PixelPrune, _keep: int, holes: bool) -> View:
    """Pictures, or places of cut pictures: rectangles, here with a hole in the last."""
    if not holes:
        return make_view(method)
    side = 6
    levels = (numbers(1, 3, side * side, 2).add(1) * 1.5).floor() / 3 + 0.05 * numbers(
        2, 3, side * side, 2
    )
    alive = [
        [(row, column) for row in range(rows) for column in range(2, side) if (row, column) != hole]
        for rows, hole in ((5, (0, 2)), (5, (4, 5)), (5, (2, 3)))
    ]
    index = torch.tensor([[row * side + column for row, column in places] for places in alive])
    pixels = levels.gather(1, index[..., None].expand(-1, -1, 2))
    grid = pad(torch.tensor(alive), (2, 0))
    return View(SITE, torch.zeros(*index.shape, 4), grid, {"pixels": pixels})


def picture_view(pixels: Tensor, columns: int) -> Any:
    return released_view(SITE, torch.zeros(1, len(pixels), 4), columns, pixels=pixels[None])


def test_a_flat_rectangle_by_hand() -> None:
    """White with a black rectangle: the first patch, the rectangle's first, and the white right of it and below it."""
    picture = torch.ones(5, 6)
    picture[1:3, 2:5] = 0
    plan = PixelPrune().plan(picture_view(picture.view(-1, 1), 6), 4)
    assert [divmod(index, 6) for index in plan.kept[0].tolist()] == [(0, 0), (1, 2), (1, 5), (3, 2)]
    assert int(PixelPrune().plan(picture_view(picture.view(-1, 1), 6), 7).spare) == 3


def slow_pixelprune(method: PixelPrune, view: View, row: int, keep: int) -> list[int]:
    """The largest errors of one picture, by which the method ranks."""
    places = list(map(tuple, view.grid[row, :, 2:].tolist()))
    patches = dict(zip(places, view.signals["pixels"][row].tolist(), strict=True))
    errors = slow_errors(patches, method.tau)
    scores = [errors[place] for place in places]
    assert method.plan(view, keep).scores[row].tolist() == pytest.approx(scores, abs=1e-6)
    return best(scores, keep)


def released_pixelprune(case: dict[str, Any]) -> None:
    size = case["rows"] * case["columns"]
    level = ((numbers(case["seed"], size, 1) + 1) * 1.2).floor() / 2
    flat = torch.cat([level, torch.full_like(level, 0.5), 1 - level], dim=1)
    pixels = flat + case["noise"] * numbers(case["seed"] + 50, size, 3)
    plan = PixelPrune(case["tau"]).plan(picture_view(pixels, case["columns"]), len(case["kept"]))
    assert (plan.kept[0].tolist(), int(plan.spare)) == (case["kept"], 0)


test_pixelprune = check_method(
    "pixelprune",
    slow_pixelprune,
    settings=({}, {"tau": 0.2}),
    views=with_gaps,
    varied=(False, True),
    keeps=(1, 3, 12, 18),
    released=released_pixelprune,
)


@pytest.mark.parametrize("name", ["llava", "onevision_image"])
def test_pixels_are_those_of_the_patches(name: str) -> None:
    adapter, chats = adapter_of(name), chats_of(name)[:1]
    (view,) = shown(adapter, [SITE], [Need("pixels")], chats, 0.5)
    pixels = view.signals["pixels"][0]
    pictures = adapter.encode(chats)["pixel_values"].flatten(end_dim=-4).double()
    side = round((pixels.shape[1] / 3) ** 0.5)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in adapter.colours())
    for token, (row, column) in enumerate(view.grid[0, :, 2:].tolist()):
        cut = pictures[0, :, row * side : (row + 1) * side, column * side : (column + 1) * side]
        torch.testing.assert_close(
            pixels[token].double(), (cut * std + mean).flatten(), atol=1e-6, rtol=0
        )
