"""Crops, their regions and their quotas, against slow references and by hand."""

from __future__ import annotations

import pytest
import torch

from espalier.methods.base import MethodError, Site, View
from espalier.methods.select.crops import Crops, Regions
from espalier.methods.select.quotas import apportion, best_of_groups, top_of_groups
from espalier.methods.select.topk import indices_of
from tests.methods.cases import build, case_id, generators_for, rows_of_view
from tests.methods.crop_views import (
    ROWS,
    cropped,
    groups,
    joined,
    over_crop,
    slow_apportion,
    slow_sampled,
)


@pytest.mark.parametrize("seed", range(30))
def test_quotas_equal_dealing_out_in_rounds(seed: int):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 9, (4, 7), generator=generator)
    sizes[:, 0] = 5
    weights = torch.rand(4, 7, generator=generator).square() * (sizes > 0)
    for total in range(1, int(sizes.sum(1).min()) + 1):
        quotas = apportion(weights, sizes, total)
        assert quotas.sum(1).tolist() == [total] * 4
        assert ((quotas >= 0) & (quotas <= sizes)).all()
        for row in range(4):
            wanted = slow_apportion(weights[row].tolist(), sizes[row].tolist(), total)
            assert quotas[row].tolist() == wanted


@pytest.mark.parametrize(
    ("weights", "sizes", "total", "wanted"),
    [
        ([1, 1, 1], [9, 9, 9], 4, [2, 1, 1]),  # the fraction goes to the lower index
        ([3, 1], [100, 100], 40, [30, 10]),
        ([3, 1, 1], [6, 100, 100], 20, [6, 7, 7]),  # 12 asked, 6 there
        ([0, 1, 0], [4, 4, 4], 3, [0, 3, 0]),
        ([0, 1, 0], [4, 4, 4], 8, [2, 4, 2]),  # those without weight come last
        ([0, 0], [3, 5], 4, [2, 2]),
        ([5, 5, 1], [2, 0, 2], 4, [2, 0, 2]),
    ],
)
def test_quotas_by_hand(weights, sizes, total, wanted):
    quotas = apportion(torch.tensor([weights]).float(), torch.tensor([sizes]), total)
    assert quotas.tolist() == [wanted]


def test_the_best_of_groups():
    group = torch.tensor([[0, 1, 0, 1, 1, 2]])
    scores = torch.tensor([[1.0, 5, 2, 5, 7, 0]])
    quotas = torch.tensor([[1, 2, 1, 0, 0, 0]])
    assert indices_of(best_of_groups(scores, group, quotas), 4).tolist() == [[1, 2, 4, 5]]
    assert top_of_groups(scores, group, quotas, 4).tolist() == [[1, 2, 4, 5]]


@pytest.mark.parametrize("name", ROWS)
def test_crops_are_numbered_image_by_image(name: str):
    grid, tile = ROWS[name]
    crops = Crops.of(grid, tile)
    for number, ((image, crop), tokens) in enumerate(groups(grid[0], tile[0]).items()):
        assert crops.index[0, tokens].tolist() == [number] * len(tokens)
        assert (crops.size[0, number], crops.image[0, number]) == (len(tokens), image)
        assert bool(crops.is_overview[0, number]) == (crop == 0)
    assert int(crops.size.sum()) == grid.shape[1]


@pytest.mark.parametrize("name", ROWS)
def test_weights_are_whole_images(name: str):
    """Each image weighs its tokens, its global view the asked share of them or everything."""
    grid, tile = ROWS[name]
    crops = Crops.of(grid, tile)
    importance = torch.rand(crops.size.shape, generator=torch.Generator().manual_seed(0))
    weights = crops.weights(importance, 0.3)[0]
    tokens_of = groups(grid[0], tile[0])
    for image in {image for image, _ in tokens_of}:
        numbers = [n for n, key in enumerate(tokens_of) if key[0] == image]
        tokens = sum(len(tokens_of[key]) for key in tokens_of if key[0] == image)
        assert float(weights[numbers].sum()) == pytest.approx(tokens)
        share = 0.3 if len(numbers) > 1 else 1.0
        assert float(weights[numbers[0]]) == pytest.approx(share * tokens)
        split = weights[numbers[1:]] / importance[0, numbers[1:]].double()
        assert torch.allclose(split, split[:1].expand_as(split))
    assert not weights[len(tokens_of) :].any()


@pytest.mark.parametrize("name", ROWS)
def test_cells_lie_over_the_crop_at_their_place(name: str):
    grid, tile = ROWS[name]
    regions = Regions.of(Crops.of(grid, tile))
    numbers = {key: number for number, key in enumerate(groups(grid[0], tile[0]))}
    for token in range(grid.shape[1]):
        wanted = over_crop(grid[0], tile[0], token) if grid[0, token, 1] == 0 else None
        assert bool(regions.covered[0, token]) == (wanted is not None)
        position = (int(grid[0, token, 0]), int(tile[0, token]))
        assert regions.below[0, token] == numbers[wanted or position]


def test_quadrants_and_stripes_by_hand():
    regions = Regions.of(Crops.of(*ROWS["square"]))
    quadrants = [1, 1, 2, 2] * 2 + [3, 3, 4, 4] * 2
    assert regions.below[0, :16].tolist() == quadrants
    assert regions.stripes()[0, :16].tolist() == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    # A quarter of the plane is padding above and below: what is left of the image is cut, not the canvas.
    cut = Regions.of(Crops.of(*joined(cropped(4, (3, 1), (2, 0)))))
    assert cut.below[0, :16].tolist() == [1] * 4 + [2] * 8 + [3] * 4


@pytest.mark.parametrize("name", ROWS)
def test_sampling_is_resizing_the_whole_view_to_the_plane(name: str):
    """Against torch, image by image; where there are no crops, and in global views, values are what they were."""
    grid, tile = ROWS[name]
    values = torch.randn(grid.shape[:2], generator=torch.Generator().manual_seed(1))
    sampled = Regions.of(Crops.of(grid, tile)).sampled(values)
    assert torch.allclose(sampled[0], slow_sampled(grid[0], values[0]), atol=1e-5)
    whole = grid[:, :, 1] == 0
    assert torch.equal(sampled[whole], values[whole])


def test_crops_read_across_their_borders():
    """The released order by hand: cut first, either crop would read the cells over it alone, 0 or 4."""
    grid, tile = joined(cropped(2, (1, 2)))
    values = torch.tensor([[0.0, 4, 0, 4, *[9.0] * 8]])
    assert Regions.of(Crops.of(grid, tile)).sampled(values)[0, 4:].tolist() == [0, 1, 3, 4] * 2


def test_crops_that_are_not_stitched_have_no_region():
    grid = torch.tensor(
        [[(0, view, row, column) for view in (1, 2, 0) for row in (0, 1) for column in (0, 1)]]
    )
    with pytest.raises(MethodError, match="does not stitch"):
        Regions.of(Crops.of(grid, grid[:, :, 1]))


@pytest.mark.parametrize(
    "case",
    [
        ("fastervlm", {}),
        ("hired", {}),
        ("hired", {"budget": "stripes"}),
        ("globalcom2", {}),
        ("globalcom2", {"scores": "attention", "normalise": False}),
    ],
    ids=case_id,
)
def test_methods_of_crops_decide_each_row_alone(case):
    """Rows of 80 tokens: four crops; two images of one view; a cut plane and an image of one view."""
    rows = [
        ROWS["square"],
        joined(cropped(4), cropped(8, image=1)),
        joined(cropped(4, (2, 2), (1, 0)), cropped(4, image=1)),
    ]
    grid, tile = (torch.cat(parts) for parts in zip(*rows, strict=True))
    method, site = build(case), Site("prefix")
    generator = torch.Generator().manual_seed(5)
    signals = {
        need.key: tile if need.signal == "tile" else torch.rand(3, 80, generator=generator)
        for need in method.needs(site)
    }
    view = View(site, torch.zeros(3, 80, 2), grid, signals, generators_for(range(3)))
    for keep in (1, 9, 40, 79):
        together = method.plan(view, keep)
        together.check(80, keep)
        for row in range(3):
            alone = method.plan(rows_of_view(view, [row]), keep)
            assert torch.equal(alone.kept[0], together.kept[row])
