"""D2Pruner against worked examples and a slow reference that follows the paper's equations one by one."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from espalier.methods.base import Site, View
from espalier.methods.d2pruner import D2Pruner
from espalier.methods.select.cosines import memory_limit
from tests.methods.cases import grid_of, make_view
from tests.methods.twins import check_method

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
    by_importance = method.selection == "importance"
    n_pivots = keep if by_importance else math.floor(keep * method.r_pivot + 1e-9)
    kept: list[int] = []
    for i in order:
        pivot_done = len(kept) >= n_pivots
        free = not pivot_done and not method.pivot_exclusion
        if len(kept) < keep and (free or not any(adjacent(i, j) for j in kept)):
            kept.append(i)
    kept += [i for i in order if i not in kept][: keep - len(kept)]
    return sorted(kept)


def few_dimensions(method: D2Pruner, keep: int) -> View:
    """So that many tokens are alike."""
    view = make_view(method, [((0, 0, 4, 4), (0, 1, 4, 5)), ((0, 0, 6, 6),)], seed=keep)
    return replace(view, tokens=view.tokens[:, :, :3])


test_d2pruner = check_method(
    "d2pruner",
    slow_d2pruner,
    settings=(
        {},
        {"theta_sim": 0.6},
        {"alpha": 0.5, "theta_sim": 0.7},
        {"r_pivot": 0.0, "theta_sim": 0.5},
        {"r_pivot": 0.4, "theta_sim": 0.5, "pivot_exclusion": True},
    ),
    views=few_dimensions,
    keeps=(1, 3, 10, 20, 36),
    within={"": nullcontext, "no matrix": partial(memory_limit, 0)},
)


test_d2pruner_by_importance_alone = check_method(
    "d2pruner", slow_d2pruner, settings=({"selection": "importance"}, {"r_pivot": 1.0}), keeps=(10,)
)
