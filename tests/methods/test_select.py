"""Tensor operations against slow and obvious references."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.methods.base import MethodError
from espalier.methods.select import similarity
from espalier.methods.select.cosines import Computed, Held, cosines, fits, memory_limit
from espalier.methods.select.dpp import dpp_map
from espalier.methods.select.independent import independent_set
from espalier.methods.select.maxmin import farthest_first
from espalier.methods.select.merge import slot_sizes
from espalier.methods.select.nearest import LISTED, Nearest
from espalier.methods.select.similarity import (
    BLOCK,
    board_of,
    cosine,
    grid_neighbours,
    neighbours,
    unit,
    upper_blocks,
)
from espalier.methods.select.tiles import Tiles, regions, top_in_tiles
from espalier.methods.select.topk import indices_of, ranking, top
from tests.methods import slow
from tests.methods.cases import grid_of


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


def test_similarity_is_symmetric_where_a_product_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(units: Tensor) -> Any:
        for row, column, block in upper_blocks(units):
            yield row, column, block + 1e-3 * torch.arange(block.shape[2])

    monkeypatch.setattr(similarity, "upper_blocks", uneven)
    matrix = cosine(torch.randn(2, 400, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(matrix, matrix.transpose(1, 2))


def test_ranking_refuses_nan():
    scores = torch.tensor([[1.0, float("nan"), float("-inf")]])
    with pytest.raises(MethodError, match="scores: NaN or infinite among 3 values"):
        ranking(scores)


def test_indices_of_a_mask():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]]).bool()
    assert indices_of(mask, 2).tolist() == [[1, 2], [0, 3]]


# ---------------------------------------------------------------- max-min


@pytest.mark.parametrize("n_keep", [1, 2, 5, 14, 15])
@pytest.mark.parametrize("seed", range(3))
def test_farthest_first_equals_the_slow_one(seed: int, n_keep: int):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(
        3, (4, 15, 3), generator=generator
    ).float()  # many ties, some points twice
    distances = torch.cdist(points, points, p=1) / 4
    wanted = [slow.farthest_first(row, n_keep) for row in distances.tolist()]
    assert farthest_first(Held(1 - distances), n_keep).tolist() == wanted


def apart(size: int, place: int, cosine: float) -> Tensor:
    """Cosines of copies, one of which has another cosine with the others."""
    matrix = torch.ones(1, size, size)
    matrix[0, place] = matrix[0, :, place] = cosine
    return matrix


def rounded_copy() -> Tensor:
    """Token 3 is a copy of 1 whose cosines came out a little smaller, as those of another kernel may."""
    matrix = torch.eye(5)[None] * 0.7 + 0.3
    matrix[0, 1, 3] = matrix[0, 3, 1] = 1 - 1e-7
    matrix[0, 0, 3] = matrix[0, 3, 0] = 0.3 - 1e-7
    return matrix


@pytest.mark.parametrize(
    ("matrix", "kept"),
    [
        (torch.ones(2, 1, 1), [0]),
        (torch.ones(1, 6, 6), [0, 1, 2, 3]),  # duplicates are never picked twice
        (apart(5, 3, 1 - 6e-7), [0, 1]),  # four roundings of fp32
        (apart(5, 3, 1 - 6e-6), [0, 3]),
        (rounded_copy(), [0, 1]),
    ],
    ids=["one", "duplicates", "within rounding", "apart", "copy"],
)
def test_the_farthest_of_copies_is_the_lower_index(matrix: Tensor, kept: list[int]):
    assert farthest_first(Held(matrix), len(kept)).tolist() == [kept] * len(matrix)


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


class Edges:
    """A graph that is all there."""

    def __init__(self, adjacent: Tensor) -> None:
        self.adjacent = adjacent

    def rows(self, indices: Tensor) -> Tensor:
        return self.adjacent[torch.arange(len(indices)).unsqueeze(1), indices]

    def row(self, pick: Tensor, merit: Tensor) -> Tensor:
        assert torch.equal(merit.amax(dim=1, keepdim=True), merit.gather(1, pick))
        return self.rows(pick).squeeze(1)


@pytest.mark.parametrize(("n_keep", "n_pivots"), [(1, 0), (4, 0), (6, 3), (9, 9), (12, 5), (16, 2)])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("together", [2, 96])
def test_independent_set_equals_the_slow_one(
    density: float, n_keep: int, n_pivots: int, together: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("espalier.methods.select.independent.TOGETHER", together)
    generator = torch.Generator().manual_seed(n_keep)
    scores = random_scores(5, 16, n_keep)
    adjacent = torch.rand(5, 16, 16, generator=generator) < density
    adjacent = adjacent | adjacent.transpose(
        1, 2
    )  # an edge from a token to itself counts for nothing
    wanted = [
        slow_independent_set(s, a, n_keep, n_pivots)
        for s, a in zip(scores.tolist(), adjacent.tolist(), strict=True)
    ]
    chosen = independent_set(scores, Edges(adjacent), n_keep, n_pivots)
    assert chosen.kept.tolist() == wanted
    if density == 0:
        assert chosen.spare.tolist() == [0] * 5
    if density == 1:  # the first token takes every other one's place
        assert chosen.spare.tolist() == [n_keep - max(1, n_pivots)] * 5


# ---------------------------------------------------------------- similarity


def test_cosine_is_computed_in_fp32_and_a_zero_vector_is_like_nothing():
    similarity = cosine(torch.tensor([[[3.0, 4.0], [4.0, 3.0], [0.0, 0.0]]], dtype=torch.float16))
    assert similarity.dtype == torch.float32
    assert torch.allclose(similarity, torch.tensor([[[1, 0.96, 0], [0.96, 1, 0], [0, 0, 0]]]))


@pytest.mark.parametrize("n_tokens", [1, 5, 191, 193, 449])
def test_the_triangle_gives_the_whole_product(n_tokens: int):
    """Sizes beside the edges of a block; the last blocks overlap others."""
    features = torch.randn(2, n_tokens, 40, generator=torch.Generator().manual_seed(n_tokens))
    similarity, units = (
        cosine(features),
        features.double() / features.double().norm(dim=2, keepdim=True),
    )
    assert (similarity - units @ units.transpose(1, 2)).abs().max() < 1e-6
    assert torch.equal(similarity, similarity.transpose(1, 2))
    assert torch.equal(similarity.diagonal(dim1=1, dim2=2), torch.ones(2, n_tokens))


def test_neighbours_stay_inside_image_and_tile():
    grid = torch.cat([grid_of([(0, 0, 3, 3), (0, 1, 3, 3)]), grid_of([(1, 0, 3, 3)])])
    adjacent = grid_neighbours(grid[None])[0]
    places = grid.tolist()
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            step = max(abs(a[2] - b[2]), abs(a[3] - b[3]))
            assert bool(adjacent[i, j]) == (a[:2] == b[:2] and step == 1)
    assert adjacent[:9, :9].sum() == 40  # 4 corners of 3, 4 edges of 5, 1 centre of 8
    some = torch.tensor([[20, 3]])
    assert torch.equal(neighbours(board_of(grid[None]), some), adjacent[some])


# ---------------------------------------------------------------- cosines, held or computed


def crowded(n_rows: int, n_tokens: int, width: int, seed: int = 0) -> Tensor:
    """Tokens in bunches; a third of them exact copies of others, a few of other lengths, the last one zero."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(n_rows, n_tokens // 4 + 1, width, generator=generator)
    bunch = torch.randint(centres.shape[1], (n_rows, n_tokens), generator=generator)
    rows = torch.arange(n_rows).unsqueeze(1)
    tokens = centres[rows, bunch]
    tokens += 0.3 * torch.randn(n_rows, n_tokens, width, generator=generator)
    source = torch.arange(n_tokens).expand(n_rows, -1).clone()
    source[:, ::3] = torch.randint(n_tokens, source[:, ::3].shape, generator=generator)
    tokens = tokens[rows, source]
    tokens[:, ::5] *= 3.3
    tokens[:, -1] = 0
    return tokens


@pytest.mark.parametrize("width", [16, 1000])
@pytest.mark.parametrize("n_tokens", [16, 17, 50, 193, 577])
def test_held_and_computed_cosines_are_the_same_but_for_rounding(n_tokens: int, width: int):
    """A product may round in another way where its shape is another: which, is the library's business."""
    tokens = crowded(2, n_tokens, width)
    held, computed = Held(cosine(tokens)), Computed(unit(tokens))
    assert torch.equal(held.diagonal(), computed.diagonal())
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    close(held.nearest(), computed.nearest())
    close(torch.stack(held.extremes()), torch.stack(computed.extremes()))
    merit = random_scores(2, n_tokens, n_tokens)
    for n_some in (1, 2, 20):
        some = torch.randint(n_tokens, (2, n_some))
        close(held.rows(some), computed.rows(some))
        pick = some[:, :1]
        close(held.row(pick, merit), computed.row(pick, merit))
        assert torch.equal(held.row(pick, merit), held.rows(pick)[:, 0])
    part = torch.rand(2, n_tokens).argsort(dim=1)[:, : n_tokens // 2 + 1]
    everything = torch.arange(part.shape[1]).expand_as(part)
    wanted = held.rows(part).gather(2, part.unsqueeze(1).expand(-1, part.shape[1], -1))
    assert torch.equal(held.subset(part).rows(everything), wanted)
    close(computed.subset(part).rows(everything), wanted)


def test_what_they_answer_is_what_the_matrix_holds():
    matrix = cosine(crowded(2, 40, 8))
    others = matrix.clone()
    others.diagonal(dim1=1, dim2=2).fill_(-2)
    similarity = Held(matrix.clone())
    assert torch.equal(similarity.nearest(), others.amax(dim=2))
    assert torch.equal(similarity.rows(torch.tensor([[0, 39], [7, 7]]))[1, 1], matrix[1, 7])
    assert torch.equal(similarity.matrix, matrix)  # its diagonal is back
    low, high = similarity.extremes()
    assert torch.equal(low, matrix.flatten(1).amin(dim=1))
    assert torch.equal(high, matrix.flatten(1).amax(dim=1))


@pytest.mark.sampled
@pytest.mark.parametrize("make", [lambda x: Held(cosine(x)), lambda x: Computed(unit(x))])
@pytest.mark.parametrize(("n_tokens", "many"), [(2, 1024), (300, 1024), (300, 301), (300, 300)])
def test_the_likest_member_is_that_of_a_loop_over_all(monkeypatch, make, n_tokens: int, many: int):
    """Few members are not among a token's 64 likest, many are; one object searches all sets."""
    monkeypatch.setattr(Nearest, "many", many)
    tokens = crowded(3, n_tokens, 8)
    matrix, nearest = cosine(tokens), Nearest(make(tokens))
    generator = torch.Generator().manual_seed(n_tokens)
    searched = 0
    for n_members in (1, n_tokens // 100 + 1, n_tokens // 5 + 1, n_tokens):
        orders = torch.rand(3, n_tokens, generator=generator).argsort(dim=1)
        members = orders[:, :n_members]
        some = torch.randint(n_tokens, (3, 25), generator=generator)
        likeness = nearest.among(members, some)
        for row, column in torch.cartesian_prod(torch.arange(3), torch.arange(25)).tolist():
            token, others = int(some[row, column]), members[row].tolist()
            wanted = max(float(matrix[row, token, other]) for other in others)
            assert float(likeness[row, column]) == pytest.approx(wanted, abs=1e-6)
            likest = matrix[row, token].topk(min(sum(LISTED), n_tokens)).indices.tolist()
            searched += not set(others) & set(likest)
    assert (searched > 0) == (n_tokens > sum(LISTED))


class Literal(Held):
    """A matrix of its own: no blocks, no triangle."""

    def __init__(self, tokens: Tensor) -> None:
        units = torch.nn.functional.normalize(tokens, dim=-1)
        matrix = units @ units.transpose(1, 2)
        matrix.diagonal(dim1=1, dim2=2).round_()
        super().__init__(matrix)


def reference_picks(tokens: Tensor, n_keep: int) -> list[list[int]]:
    """Max-min picks of each row, from the whole matrix: all picks so far are looked at again each time."""
    kept_indices = []
    for matrix in Literal(tokens).matrix:
        distance = (1 - matrix).where(matrix <= 1 - 1e-6, 0.0)
        gap = (distance + 9 * torch.eye(len(matrix))).amin(dim=1)
        kept: list[int] = []
        while len(kept) < n_keep:
            pick = int(gap.argmax())
            copies = [i for i in range(pick) if i not in kept and distance[pick, i] == 0]
            kept.append(min([*copies, pick]))
            gap = distance[kept].amin(dim=0)
            gap[kept] = -1
        kept_indices.append(sorted(kept))
    return kept_indices


@pytest.mark.parametrize(
    ("n_tokens", "width", "n_keep"), [(36, 16, 4), (100, 8, 60), (576, 1024, 64)]
)
def test_max_min_picks_are_those_of_the_reference_either_way(
    n_tokens: int, width: int, n_keep: int
):
    tokens = crowded(2, n_tokens, width)
    wanted = reference_picks(tokens, n_keep)
    for limit in (0, 2**40):
        with memory_limit(limit):
            assert farthest_first(cosines(tokens), n_keep).tolist() == wanted


@pytest.mark.parametrize(
    ("n_tokens", "width", "n_keep"), [(36, 16, 4), (100, 8, 60), (576, 1024, 64)]
)
def test_determinantal_picks_are_the_same_either_way(n_tokens: int, width: int, n_keep: int):
    tokens = crowded(2, n_tokens, width)
    quality = random_scores(2, n_tokens, 1) + 1
    wanted = dpp_map(Literal(tokens), quality, n_keep).kept
    for limit in (0, 2**40):
        with memory_limit(limit):
            assert torch.equal(dpp_map(cosines(tokens), quality, n_keep).kept, wanted)


class Watch(TorchDispatchMode):
    """Notes the largest tensor that is made, and how often a number is read back from the device."""

    largest = 0
    waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        for output in outputs if isinstance(outputs, list | tuple) else (outputs,):
            self.largest = max(self.largest, output.numel() if isinstance(output, Tensor) else 0)
        return outputs


SELECTORS = (
    lambda tokens, n_keep: farthest_first(cosines(tokens), n_keep),
    lambda tokens, n_keep: dpp_map(cosines(tokens), torch.ones(tokens.shape[:2]), n_keep),
    lambda tokens, n_keep: cosines(tokens).extremes(),
)


@pytest.mark.parametrize("select", SELECTORS)
def test_the_matrix_is_made_only_where_it_is_held(select):
    tokens = torch.randn(1, 1000, 16, generator=torch.Generator().manual_seed(0))
    with memory_limit(0), Watch() as computed:
        select(tokens, 20)
    assert computed.largest <= BLOCK * 1000
    with memory_limit(2**40), Watch() as held:
        select(tokens, 20)
    assert 1000 * 1000 <= held.largest <= 1001 * 1000


@pytest.mark.parametrize("select", SELECTORS[:2])
def test_the_device_waits_for_no_pick_where_the_matrix_is_held(select):
    tokens = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0))
    waits = []
    for n_keep in (2, 30):
        with Watch() as watch:
            select(tokens, n_keep)
        waits.append(watch.waits)
    assert waits[0] == waits[1] <= 2  # the checks for numbers that are not finite


@pytest.mark.parametrize("limit", [0, 2**40])
def test_a_token_that_is_not_finite_is_refused_either_way(limit: int):
    tokens = torch.randn(1, 20, 8)
    tokens[0, 4, 2] = torch.nan
    with memory_limit(limit), pytest.raises(MethodError, match="cosines: NaN or infinite among 20"):
        farthest_first(cosines(tokens), 3)


def test_the_limit_decides_and_is_put_back():
    cpu, tokens = torch.device("cpu"), torch.randn(2, 20, 4)
    with memory_limit(3200):
        assert isinstance(cosines(tokens), Held)  # 4 bytes, 2 rows, 20 x 20
        with memory_limit(3199):
            assert isinstance(cosines(tokens), Computed)
            assert isinstance(cosines(tokens[:, :15]), Held)  # so few are always
        assert fits(3200, cpu)
        assert not fits(3201, cpu)
    assert isinstance(cosines(tokens), Held)


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
        quotas = tiles.quotas(n_keep)[0].tolist()
        assert quotas[: len(sizes)] == slow_quotas(sizes, n_keep)
        assert not any(quotas[len(sizes) :])
        assert all(quota <= size for quota, size in zip(quotas, sizes, strict=False))


@pytest.mark.parametrize("tiling", TILINGS)
def test_regions_are_exactly_as_many_rectangles_with_their_centres(tiling):
    grid = grid_of(tiling)
    for n_keep in range(1, len(grid) + 1):
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


@pytest.mark.parametrize(("height", "width"), [(4, 16), (16, 4), (3, 12)])
def test_regions_of_a_long_tile_are_squares_and_not_strips(height: int, width: int) -> None:
    grid, side = grid_of([(0, 0, height, width)]), min(height, width)
    region, _ = regions(grid[None], height * width // side**2)
    for number in region.unique().tolist():
        rows, columns = grid[region[0] == number][:, 2:].unbind(1)
        assert (len(rows.unique()), len(columns.unique())) == (side, side)


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
    assert (region[0].tolist(), centre[0].tolist()) == ([0, 0, 1, 1, 1, 2, 2, 2], [0, 3, 6])


def test_top_in_tiles_gives_each_tile_its_quota_of_its_best():
    grid = grid_of(((0, 0, 4, 4), (0, 1, 2, 4), (1, 0, 4, 2)))
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
    assert slot_sizes(torch.tensor([[0, 1, 1, -1, 1]])).tolist() == [[1, 3, 3, 0, 3]]
