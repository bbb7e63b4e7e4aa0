"""Balanced Token Pruning against a slow version, by hand, and against what its released code keeps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from espalier.methods.base import View
from espalier.methods.btp import BTP
from tests.methods.cases import make_view
from tests.methods.released import numbers, released_view, shares
from tests.methods.twins import check_method

SITES = BTP().sites(32)


def slow_btp(method: BTP, view: View, row: int, keep: int) -> list[int]:
    """Token by token, over lists."""
    stage, tokens = view.site.stage, view.tokens[row].double()
    scores = view.signals["last_attention"][row]
    places = view.grid[row].tolist()

    def distance(i: int, j: int) -> float:
        return 1 - float(torch.cosine_similarity(tokens[i], tokens[j], dim=0))

    def diverse(chosen: list[int], count: int) -> list[int]:
        chosen = list(chosen)
        for _ in range(count):
            rest = [i for i in range(len(tokens)) if i not in chosen]
            others = {i: chosen or [j for j in range(len(tokens)) if j != i] for i in rest}
            chosen.append(max(rest, key=lambda i: (min(distance(i, j) for j in others[i]), -i)))
        return chosen

    n_attention = int(method.attention[stage] * keep + 1e-9)
    order = sorted(range(len(tokens)), key=lambda i: (-float(scores[i]), i))
    order = order[: int(method.candidates[stage] * n_attention + 1e-9)]
    chosen = [i for i in order if i < keep] + [i for i in order if i >= keep]
    chosen = chosen[:n_attention]
    if n_attention < keep:
        chosen += sorted(diverse([], int(method.diversity[stage] * keep + 1e-9)))
    even: list[int] = []
    for _ in range(int(method.places[stage] * keep + 1e-9)):
        rest = [i for i in range(len(tokens)) if i not in even]
        even.append(
            max(rest, key=lambda i: (min((away(places, i, j) for j in even), default=0), -i))
        )
    chosen = list(dict.fromkeys([*chosen, *even]))[:keep]
    return sorted(diverse(chosen, keep - len(chosen)))


def away(places: list[list[int]], i: int, j: int) -> int:
    """Rows and columns between two places of one picture."""
    return abs(places[i][2] - places[j][2]) + abs(places[i][3] - places[j][3])


def test_attention_prefers_the_first_part_by_hand():
    """Stage 3 keeps 2 of the best 2: with 5 the best 6 are candidates, of which 1 and 3 lie among the first five."""
    scores = torch.tensor([[0.0, 0.3, 0.0, 0.2, 0.0, 0.9, 0.8, 0.7, 0.6, 0.1]])
    view = released_view(SITES[2], torch.ones(1, 10, 2), 5, last_attention=scores)
    assert BTP().plan(view, 2).kept.tolist() == [[5, 6]]
    assert BTP().plan(view, 5).kept.tolist() == [[1, 3, 5, 6, 7]]


def released_btp(case: dict[str, Any]) -> None:
    tokens = numbers(case["seed"], 1, case["tokens"], 8)
    scores = shares(case["seed"] + 100, 1, case["tokens"])
    whole = released_view(SITES[0], tokens, case["side"]).grid
    for site, (before, after) in zip(
        SITES, pairwise([list(range(case["tokens"])), *case["kept"]]), strict=True
    ):
        signals = {"last_attention": scores[:, before]}
        view = View(site, tokens[:, before], whole[:, before], signals)
        assert [before[i] for i in BTP().plan(view, len(after)).kept[0].tolist()] == after


test_btp = check_method(
    "btp",
    slow_btp,
    views=lambda method, _keep, stage: make_view(
        method, [((0, 0, 4, 5),), ((0, 0, 5, 4),), ((0, 0, 2, 10),)], site=SITES[stage]
    ),
    varied=(0, 1, 2),
    keeps=(1, 3, 9, 18, 20),
    released=released_btp,
)
