"""D2Pruner against worked examples and a slow reference that follows the paper's equations one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from espalier.methods.base import Site, View
from espalier.methods.d2pruner import D2Pruner
from espalier.methods.select.cosines import memory_limit
from tests.methods.cases import grid_of, make_view
from tests.methods.twins import check_slow

ANGLES = (0, 10, 90, 5, 15, 95, 180, 185, 3)
IMPORTANCE = (0.9, 0.8, 0.3, 0.7, 0.6, 0.2, 0.5, 0.4, 0.1)


def worked_view() -> View:
    """Nine tokens on a 3 x 3 grid, unit vectors in the plane."""
    turns = torch.tensor(ANGLES) * math.pi / 180
    tokens = torch.stack([turns.cos(), turns.sin()], dim=1)[None]
    signals = {"last_attention": torch.tensor([IMPORTANCE]), "prior": torch.ones(1, 9)}
    return View(Site("layer", 2), tokens, grid_of([(0, 0, 3, 3)])[None], signals)


def edges_of(method: D2Pruner, view: View) -> Tensor:
    """All edges between different tokens, (B, N, N)."""
    n_rows, n_tokens = view.tokens.shape[:2]
    edges = method.graph(view).rows(torch.arange(n_tokens).expand(n_rows, -1))
    return edges & ~torch.eye(n_tokens, dtype=torch.bool)


@pytest.mark.parametrize(
    ("alpha", "n_edges", "keep", "kept"),
    [
        (1.0, 12, 6, [0, 1, 2, 3, 4, 6]),  # token 4 comes from filling up
        (0.5, 10, 6, [0, 1, 2, 3, 6, 8]),
        (1.0, 12, 4, [0, 1, 2, 6]),
    ],
)
def test_worked_examples(alpha: float, n_edges: int, keep: int, kept: list[int]):
    method = D2Pruner(alpha=alpha, r_pivot=0.5)
    view = worked_view()
    assert int(edges_of(method, view).sum()) == 2 * n_edges
    assert method.plan(view, keep).kept.tolist() == [kept]


def slow_d2pruner(method: D2Pruner, view: View, row: int, keep: int) -> list[int]:
    h = view.tokens[row].double()
    n = len(h)
    ori, bias = view.signals["last_attention"][row].tolist(), view.signals["prior"][row].tolist()
    rel = [a / (b + 1e-7) for a, b in zip(ori, bias, strict=True)]  # (3)
    sem = [[float(h[i] @ h[j] / h[i].norm() / h[j].norm()) for j in range(n)] for i in range(n)]
    low, high = min(map(min, sem)), max(map(max, sem))
    place = view.grid[row].tolist()

    def adjacent(i: int, j: int) -> bool:
        same = place[i][:2] == place[j][:2]
        step = max(abs(place[i][2] - place[j][2]), abs(place[i][3] - place[j][3]))
        spatial = float(same and step == 1)  # (6)
        semantic = (sem[i][j] - low) / (high - low)  # (5)
        return method.alpha * semantic + (1 - method.alpha) * spatial > method.theta_sim  # (7), (8)

    order = sorted(range(n), key=lambda i: (-rel[i], i))
    n_pivots = math.floor(keep * method.r_pivot + 1e-9)
    kept: list[int] = []
    for i in order:
        pivot_done = len(kept) >= n_pivots
        free = not pivot_done and not method.pivot_exclusion
        if len(kept) < keep and (free or not any(adjacent(i, j) for j in kept)):
            kept.append(i)
    kept += [i for i in order if i not in kept][: keep - len(kept)]
    return sorted(kept)


@pytest.mark.parametrize("keep", [1, 3, 10, 20, 36])
@pytest.mark.parametrize(
    "method",
    [
        D2Pruner(),
        D2Pruner(theta_sim=0.6),
        D2Pruner(alpha=0.5, theta_sim=0.7),
        D2Pruner(r_pivot=0.0, theta_sim=0.5),
        D2Pruner(r_pivot=0.4, theta_sim=0.5, pivot_exclusion=True),
    ],
    ids=str,
)
def test_equals_the_equations(method: D2Pruner, keep: int):
    view = make_view(method, [((0, 0, 4, 4), (0, 1, 4, 5)), ((0, 0, 6, 6),)], seed=keep)
    # Few dimensions, so that many tokens are alike.
    view = replace(view, tokens=view.tokens[:, :, :3])
    check_slow(method, view, slow_d2pruner, (keep,))
    with memory_limit(0):  # no matrix of similarities
        check_slow(method, view, slow_d2pruner, (keep,))


def test_the_ablation_is_the_ranking_by_debiased_importance():
    view = make_view(D2Pruner())
    relative = view.signals["last_attention"] / (view.signals["prior"] + 1e-7)
    wanted = relative.topk(10, dim=1).indices.sort(dim=1).values
    assert torch.equal(D2Pruner(selection="importance").plan(view, 10).kept, wanted)
    assert torch.equal(D2Pruner(r_pivot=1.0).plan(view, 10).kept, wanted)
