"""Tensor operations against slow and obvious references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from methods.base import MethodError
from methods.select.independent import independent_set
from methods.select.maxmin import farthest_first
from methods.select.merging import slot_sizes
from methods.select.ranking import indices_of, ranking, top
from methods.select.similarity import cosine, grid_neighbours
from methods.select.tiles import Tiles, regions, top_in_tiles
from tests.method_cases import grid_of


def random_scores(n_rows: int, n_tokens: int, seed: int, levels: int = 5) -> Tensor:
    """Scores with many ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (n_rows, n_tokens), generator=generator).float()


def slow_ranking(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


@pytest.mark.parametrize("seed", range(5))
def test_ranking_breaks_ties_by_index(seed: int):
    scores = random_scores(3, 20, seed)
    assert ranking(scores).tolist() == [slow_ranking(row) for row in scores.tolist()]
    assert top(scores, 7).tolist() == [sorted(slow_ranking(row)[:7]) for row in scores.tolist()]


def test_ranking_refuses_nan_and_says_how_many():
    scores = torch.tensor([[1.0, float("nan"), float("-inf")]])
    with pytest.raises(MethodError, match="2 of 3 values are NaN or infinite"):
        ranking(scores)


def test_indices_of_a_mask():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]]).bool()
    assert indices_of(mask, 2).tolist() == [[1, 2], [0, 3]]


# ---------------------------------------------------------------- max-min


def slow_farthest_first(distances: list[list[float]], n_keep: int) -> list[int]:
    n = len(distances)
    nearest = [min((distances[i][j] for j in range(n) if j != i), default=0.0) for i in range(n)]
    kept = [max(range(n), key=lambda i: (nearest[i], -i))]
    while len(kept) < n_keep:
        rest = [i for i in range(n) if i not in kept]
        kept.append(max(rest, key=lambda i: (min(distances[i][j] for j in kept), -i)))
    return sorted(kept)


@pytest.mark.parametrize("n_keep", [1, 2, 5, 14, 15])
@pytest.mark.parametrize("seed", range(3))
def test_farthest_first_equals_the_slow_one(seed: int, n_keep: int):
    generator = torch.Generator().manual_seed(seed)
    distances = torch.randint(4, (4, 15, 15), generator=generator).float()  # with many ties
    distances = (distances + distances.transpose(1, 2)) / 2
    distances.diagonal(dim1=1, dim2=2).zero_()
    wanted = [slow_farthest_first(row, n_keep) for row in distances.tolist()]
    assert farthest_first(distances, n_keep).tolist() == wanted


def test_farthest_first_of_one_token():
    assert farthest_first(torch.zeros(2, 1, 1), 1).tolist() == [[0], [0]]


def test_duplicates_are_never_picked_twice():
    assert farthest_first(torch.zeros(1, 6, 6), 4).tolist() == [[0, 1, 2, 3]]


# ---------------------------------------------------------------- independent set


def slow_independent_set(
    scores: list[float], adjacent: list[list[bool]], n_keep: int, n_pivots: int
) -> list[int]:
    order = slow_ranking(scores)
    kept = order[:n_pivots]
    pool = [i for i in order[n_pivots:] if not any(adjacent[i][p] for p in kept)]
    while len(kept) < n_keep and pool:
        pick = pool[0]
        kept.append(pick)
        pool = [i for i in pool[1:] if not adjacent[pick][i]]
    kept += [i for i in order if i not in kept][: n_keep - len(kept)]
    return sorted(kept)


@pytest.mark.parametrize(("n_keep", "n_pivots"), [(1, 0), (4, 0), (6, 3), (9, 9), (12, 5), (16, 2)])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.4, 1.0])
def test_independent_set_equals_the_slow_one(density: float, n_keep: int, n_pivots: int):
    generator = torch.Generator().manual_seed(n_keep)
    scores = random_scores(5, 16, n_keep)
    adjacent = torch.rand(5, 16, 16, generator=generator) < density
    adjacent = (adjacent | adjacent.transpose(1, 2)) & ~torch.eye(16, dtype=torch.bool)
    wanted = [
        slow_independent_set(s, a, n_keep, n_pivots)
        for s, a in zip(scores.tolist(), adjacent.tolist(), strict=True)
    ]
    assert independent_set(scores, adjacent, n_keep, n_pivots).tolist() == wanted


def test_an_independent_set_holds_no_edge_while_the_pool_lasts():
    grid = grid_of([(0, 0, 6, 6)])[None]
    adjacent = grid_neighbours(grid)
    kept = independent_set(
        torch.rand(1, 36, generator=torch.Generator().manual_seed(0)), adjacent, 4
    )
    assert not adjacent[0][kept[0]][:, kept[0]].any()


# ---------------------------------------------------------------- similarity


def test_cosine_is_computed_in_fp32_and_a_zero_vector_is_like_nothing():
    features = torch.tensor([[[3.0, 4.0], [4.0, 3.0], [0.0, 0.0]]], dtype=torch.float16)
    found = cosine(features)
    assert found.dtype == torch.float32
    assert torch.allclose(found, torch.tensor([[[1, 0.96, 0], [0.96, 1, 0], [0, 0, 0]]]))


def test_neighbours_stay_inside_image_and_tile():
    grid = torch.cat([grid_of([(0, 0, 3, 3), (0, 1, 3, 3)]), grid_of([(1, 0, 3, 3)])])
    found = grid_neighbours(grid[None])[0]
    places = grid.tolist()
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            step = max(abs(a[2] - b[2]), abs(a[3] - b[3]))
            assert bool(found[i, j]) == (a[:2] == b[:2] and step == 1)
    assert found[:9, :9].sum() == 40  # 4 corners of 3, 4 edges of 5, 1 centre of 8


# ---------------------------------------------------------------- tiles and regions


def slow_quotas(sizes: list[int], n_keep: int) -> list[int]:
    total = sum(sizes)
    share = [size * n_keep // total for size in sizes]
    order = sorted(range(len(sizes)), key=lambda i: (-(sizes[i] * n_keep % total), i))
    for i in order[: n_keep - sum(share)]:
        share[i] += 1
    return share


TILINGS = (
    ((0, 0, 6, 8),),
    ((0, 0, 1, 7),),
    ((0, 0, 7, 1),),
    ((0, 0, 4, 4), (0, 1, 4, 4), (1, 0, 2, 9)),
    ((0, 0, 1, 1), (0, 1, 5, 5), (0, 2, 2, 3)),
)


@pytest.mark.parametrize("tiling", TILINGS)
def test_quotas_are_proportional_exact_and_fit(tiling):
    grid = grid_of(tiling)[None]
    sizes = [height * width for _, _, height, width in tiling]
    tiles = Tiles.of(grid)
    for n_keep in range(1, sum(sizes) + 1):
        found = tiles.quotas(n_keep)[0].tolist()
        assert found[: len(sizes)] == slow_quotas(sizes, n_keep)
        assert not any(found[len(sizes) :])
        assert all(quota <= size for quota, size in zip(found, sizes, strict=False))


@pytest.mark.parametrize("tiling", TILINGS)
def test_regions_are_exactly_as_many_rectangles_with_their_centres(tiling):
    grid = grid_of(tiling)
    n_tokens = len(grid)
    for n_keep in range(1, n_tokens + 1):
        region, centre = regions(grid[None], n_keep)
        assert sorted(set(region[0].tolist()) - {-1}) == list(range(n_keep))
        assert centre.shape == (1, n_keep)
        for number in range(n_keep):
            members = grid[region[0] == number]
            assert len(members[:, :2].unique(dim=0)) == 1
            low, high = members[:, 2:].amin(dim=0), members[:, 2:].amax(dim=0)
            assert len(members) == int((high - low + 1).prod())  # a full rectangle
            assert torch.equal(grid[centre[0, number], 2:], (low + high) // 2)
        assert torch.all(torch.diff(centre[0]) > 0)


def test_regions_are_squares_where_the_count_allows():
    region, _ = regions(grid_of([(0, 0, 12, 12)])[None], 36)
    tall = region.view(12, 12)
    wanted = (torch.arange(12) // 2).unsqueeze(1) * 6 + torch.arange(12) // 2
    assert torch.equal(tall, wanted)


@pytest.mark.parametrize("n_keep", [1, 14, 36, 72, 100])
def test_regions_are_nearly_equal(n_keep: int):
    region, _ = regions(grid_of([(0, 0, 12, 12)])[None], n_keep)
    sizes = region[0].bincount()
    ideal = math.sqrt(144 / n_keep)
    assert sizes.min() >= max(1, math.floor(ideal) ** 2)
    assert sizes.max() <= (math.ceil(ideal) + 1) ** 2


def test_a_tile_with_gaps_is_cut_into_runs():
    grid = grid_of([(0, 0, 5, 5)])[torch.tensor([0, 2, 3, 7, 11, 12, 18, 24])]
    region, centre = regions(grid[None], 3)
    assert region[0].tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert centre[0].tolist() == [0, 3, 6]


def test_top_in_tiles_gives_each_tile_its_quota_of_its_best():
    tiling = ((0, 0, 4, 4), (0, 1, 2, 4), (1, 0, 4, 2))
    grid = grid_of(tiling)
    scores = random_scores(3, 32, 0)
    for n_keep in (1, 4, 9, 31, 32):
        kept = top_in_tiles(scores, grid.expand(3, -1, -1), n_keep)
        quotas = slow_quotas([16, 8, 8], n_keep)
        for row in range(3):
            wanted = []
            for start, size, quota in zip((0, 16, 24), (16, 8, 8), quotas, strict=True):
                local = slow_ranking(scores[row, start : start + size].tolist())[:quota]
                wanted += [start + place for place in local]
            assert kept[row].tolist() == sorted(wanted)


def test_slot_sizes():
    slot = torch.tensor([[0, 1, 1, -1, 1]])
    assert slot_sizes(slot).tolist() == [[1, 3, 3, 0, 3]]
