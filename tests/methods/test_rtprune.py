"""RTPrune: both stages against slow references, its merging steps by hand, and in the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from espalier.methods.base import View
from espalier.methods.rtprune import Merging, RTPrune
from espalier.methods.select.absorption import nearby
from tests.methods.cases import SQUARE, grid_of, make_view
from tests.methods.slow import peaks
from tests.methods.twins import check_method, outcome, seeded

#: Two images of other shapes in one sample, and one.
TWO = [((0, 0, 4, 5), (1, 0, 2, 6)), ((0, 0, 4, 8),)]
MERGING = get_args(Merging)


# ---------------------------------------------------------------- slow references


def cosines(x: np.ndarray) -> list[list[float]]:
    units = [vector / max(1e-12, math.sqrt(float(vector @ vector))) for vector in x]
    return [[float(a @ b) for b in units] for a in units]


def slow_transport(scores: list[list[float]], z: float, iters: int) -> list[list[float]]:
    m, j = len(scores), len(scores[0])
    kernel = np.exp(np.array([[*row, z] for row in scores] + [[z] * (j + 1)]))
    x, y = np.ones(m + 1), np.ones(j + 1)
    a, b = np.array([1.0] * m + [j]), np.array([1.0] * j + [m])
    for _ in range(iters):
        x = a / np.array([kernel[i] @ y for i in range(m + 1)])
        y = b / np.array([kernel[:, k] @ x for k in range(j + 1)])
    return [[x[i] * kernel[i, k] * y[k] for k in range(j)] for i in range(m)]


def slow_clusters(
    x: np.ndarray, kept: list[int], dropped: list[int], norms: list[float]
) -> list[dict[int, float]]:
    """For each kept token, the weight of each recycled one."""
    n_recycled = min(math.floor(0.3 * len(dropped) + 1e-9) + 1, len(dropped))
    n_clusters = min(n_recycled // 10 + 1, n_recycled)
    pool = sorted(sorted(dropped, key=lambda j: (-norms[j], j))[:n_recycled])
    d = [[float(np.mean((x[i] - x[j]) ** 2)) for j in pool] for i in pool]
    places = range(len(pool))
    centres = peaks(d, n_clusters, n_clusters)
    groups: list[list[int]] = [[] for _ in centres]
    for i in places:
        centre_number = centres.index(i) if i in centres else None
        near = min(range(len(centres)), key=lambda c: (d[i][centres[c]], c))
        groups[near if centre_number is None else centre_number].append(pool[i])
    joined: list[list[list[int]]] = [[] for _ in kept]
    for group in groups:
        centre = np.mean([x[j] for j in group], axis=0)
        similar = cosines(np.stack([centre, *(x[i] for i in kept)]))[0][1:]
        joined[similar.index(max(similar))].append(group)
    return [
        {j: 1 / len(group) / len(own_groups) for group in own_groups for j in group}
        for own_groups in joined
    ]


def slow_weights(
    method: RTPrune, view: View, row: int, kept: list[int], dropped: list[int]
) -> list[dict[int, float]]:
    """For each kept token, the weight of each dropped token in what it is given."""
    x = view.tokens[row].double().numpy()
    norms = [math.sqrt(float(cell @ cell)) for cell in x]
    grid = view.grid[row].tolist()
    similar = cosines(x)
    n = len(x)
    if method.merging == "ot":
        scores = [[similar[i][j] for j in dropped] for i in kept]
        plan = slow_transport(scores, method.z, method.iters)
        return [dict(zip(dropped, line, strict=True)) for line in plan]
    if method.merging == "visionzip":
        best = {j: max(kept, key=lambda i: (similar[i][j], -i)) for j in dropped}
        members = [[j for j in dropped if best[j] == i] for i in kept]
        return [{j: 1 / len(sources) for j in sources} for sources in members]
    if method.merging == "sparsevlm":
        return slow_clusters(x, kept, dropped, norms)
    if method.merging == "nuwa":
        weights = []
        for i in kept:
            tile = [cell for cell in grid if cell[:2] == grid[i][:2]]
            area = (max(cell[2] for cell in tile) + 1) * (max(cell[3] for cell in tile) + 1)
            radius = math.sqrt(280 / 576 * area)
            raw = {}
            for j in dropped:
                if grid[j][:2] == grid[i][:2]:
                    apart = math.hypot(grid[i][2] - grid[j][2], grid[i][3] - grid[j][3])
                    raw[j] = max(similar[i][j], 0) * (1 - min(1, apart / radius))
            total = sum(raw.values())
            weights.append({j: w / total for j, w in raw.items()} if total else {})
        return weights
    # The released code thresholds each row at its 9th highest similarity, its own to itself included.
    ninth = [sorted(similar[i], reverse=True)[min(8, n - 1)] for i in range(n)]

    def edge(i: int, j: int) -> bool:
        (a, b), same = (grid[i], grid[j]), grid[i][:2] == grid[j][:2]
        beside = same and max(abs(a[2] - b[2]), abs(a[3] - b[3])) == 1
        return i != j and (beside or similar[i][j] >= ninth[i])

    degree = [sum(edge(i, j) for j in range(n)) for i in range(n)]
    return [{j: 1 / math.sqrt(degree[i] * degree[j]) for j in dropped if edge(i, j)} for i in kept]


def slow_rtprune(method: RTPrune, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """What is kept, and what it becomes, token by token in fp64."""
    x = view.tokens[row].double().numpy()
    norms = [math.sqrt(float(vector @ vector)) for vector in x]
    kept = sorted(sorted(range(len(x)), key=lambda i: (-norms[i], i))[:keep])
    dropped = [i for i in range(len(x)) if i not in kept]
    if method.merging == "none" or not dropped:
        return {i: torch.from_numpy(x[i]) for i in kept}
    weighted = zip(kept, slow_weights(method, view, row, kept, dropped), strict=True)
    return {
        i: torch.from_numpy(x[i] + method.alpha * sum(w * x[j] for j, w in weights.items()))
        for i, weights in weighted
    }


# ---------------------------------------------------------------- both stages


test_rtprune = check_method(
    "rtprune",
    slow_rtprune,
    settings=[{"merging": merging, "alpha": 0.4, "iters": 30} for merging in MERGING],
    views=seeded(TWO),
    keeps=(1, 2, 9, 24, 31, 32),
    atol=1e-4,
)

test_rtprune_with_many_clusters = check_method(
    "rtprune",
    slow_rtprune,
    settings=({"merging": "sparsevlm", "alpha": 1.0},),
    views=lambda method, _keep: make_view(method, SQUARE, seed=5),
    keeps=(30,),
    atol=1e-4,
)


def test_a_small_case_by_hand():
    """The longest of three tokens is kept; what it takes in are the shares of a worked transport plan."""
    tokens = torch.tensor([[[0.0, 1.0], [3.0, 0.0], [2.0, 0.0]]])
    view = replace(make_view(RTPrune(), [((0, 0, 1, 3),)]), tokens=tokens)
    plan = RTPrune().plan(view, 2)
    assert plan.kept.tolist() == [[1, 2]]
    # Both kept tokens are orthogonal to the dropped one: equal shares P, and P = x y with the dustbins' z = 0.2.
    share = slow_transport([[0.0], [0.0]], 0.2, 100)[0][0]
    assert outcome(view, plan)[0].tolist() == [
        [3.0, pytest.approx(0.1 * share)],
        [2.0, pytest.approx(0.1 * share)],
    ]
    # [[1], [0]] is the plan [.469644, .245719].
    other = replace(view, tokens=torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]]))
    merged = outcome(other, RTPrune(alpha=1.0).plan(other, 2))[0]
    assert torch.allclose(merged, torch.tensor([[3.469644, 0.0], [0.245719, 2.0]]), atol=1e-5)


# ---------------------------------------------------------------- inputs at the edge


@pytest.mark.parametrize("merging", MERGING)
@pytest.mark.parametrize(
    "tokens", [torch.ones(1, 20, 8), torch.zeros(1, 20, 8)], ids=["alike", "0"]
)
@pytest.mark.parametrize("keep", [1, 7, 19])
def test_identical_tokens_and_zero_vectors_come_in_order(
    merging: Merging, tokens: Tensor, keep: int
):
    view = replace(make_view(RTPrune(), [((0, 0, 4, 5),)]), tokens=tokens)
    plan = RTPrune(merging=merging).plan(view, keep)
    assert plan.kept.tolist() == [list(range(keep))]
    assert torch.isfinite(outcome(view, plan)).all()
    assert tokens.any() or not outcome(view, plan).any()


def test_merging_gives_nothing_where_nothing_is_near():
    """A kept token alone in its image, and one whose neighbours all point away."""
    grid = torch.stack([grid_of(((0, 0, 1, 1), (1, 0, 1, 3)))])
    similarity = torch.tensor([[[1.0, 1.0], [-1.0, -0.5]]])
    kept, dropped = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    assert not nearby(similarity, grid, kept, dropped, 1.0).any()


# ---------------------------------------------------------------- what the norm is worth, and the engine
