"""VLM-Pruner against a slow version, by hand, on models, and against what its released code keeps and merges."""

from __future__ import annotations

import math
from typing import Any

import torch

from espalier.methods.base import Site, View
from espalier.methods.vlmpruner import VLMPruner
from tests.methods.cases import make_view
from tests.methods.released import numbers, released_view
from tests.methods.twins import check_method, outcome

LAYER = Site("layer", 2)


def slow_vlmpruner(method: VLMPruner, view: View, row: int, keep: int) -> list[int]:
    """Token by token, over lists, with all comparisons made anew."""
    keys = view.signals["visual_keys"][row].double().transpose(0, 1).flatten(1)
    tokens, places = view.tokens[row].double(), view.grid[row].tolist()
    varied = tokens.float().var(dim=0).topk(min(method.channels, tokens.shape[1])).indices
    tokens, everything = tokens[:, varied], range(len(tokens))
    kept = [max(everything, key=lambda i: (float(keys[i].abs().sum()), -i))]
    while len(kept) < min(keep, method.pivot_image_token):
        rest = [i for i in everything if i not in kept]
        kept.append(
            max(rest, key=lambda i: (min(float((keys[i] - keys[j]).norm()) for j in kept), -i))
        )

    def distance(i: int, j: int) -> float:
        if places[i][:2] != places[j][:2]:
            return 1.0
        picture = [place[2:] for place in places if place[:2] == places[i][:2]]
        diagonal = math.hypot(*(max(axis) + 1 for axis in zip(*picture, strict=True)))
        return math.dist(places[i][2:], places[j][2:]) / diagonal

    def likeness(i: int) -> float:
        like = max(float(torch.cosine_similarity(tokens[i], tokens[j], dim=0)) for j in kept)
        return like * (1 + 0.5 * min(distance(i, j) for j in kept))

    theta = method.threshold
    while len(kept) < keep:
        order = sorted((i for i in everything if i not in kept), key=lambda i: (likeness(i), i))
        before = len(kept)
        for start in range(0, len(order), method.token_batch):
            if start == method.token_batch and len(kept) == before:
                break
            group = order[start : start + method.token_batch]
            alike = {i: likeness(i) for i in group}
            joining = [i for i in group if alike[i] < theta]
            if len(joining) > keep - len(kept):
                joining = sorted(group, key=lambda i: (alike[i], i))[: keep - len(kept)]
            kept += joining
        theta += 0.1
    return sorted(kept)


def by_hand(tokens: list[list[float]], lengths: list[float]) -> View:
    keys = torch.tensor(lengths).view(1, 1, -1, 1)
    return released_view(LAYER, torch.tensor([tokens]), len(tokens), visual_keys=keys)


def test_near_tokens_come_first_by_hand():
    """Both have cosine 0.6 to the pivot; the far one's distance of 3 / sqrt(17) makes that 0.82, and it waits."""
    view = by_hand([[1.0, 0], [0.6, 0.8], [1, 0], [0.6, -0.8]], [4.0, 1, 1, 1])
    assert VLMPruner(pivot_image_token=1).plan(view, 2).kept.tolist() == [[0, 1]]
    # Of equal cosines of 0 the near one is not preferred, since nothing is multiplied: the lower index comes first.
    view = by_hand([[0.0, 1], [1, 0], [0, 1], [0, -1]], [1.0, 1, 4, 1])
    assert VLMPruner(pivot_image_token=1).plan(view, 2).kept.tolist() == [[2, 3]]


def test_what_goes_merges_by_hand():
    """Token 1 goes into 0: 0.3 of itself and 0.7 of what comes; one with a cosine of 0 adds nothing."""
    view = by_hand([[2.0, 0], [4, 0], [0, 1], [0, -1]], [9.0, 8, 1, 5])
    plan = VLMPruner(pivot_image_token=2).plan(view, 2)
    assert plan.kept.tolist() == [[0, 2]]
    torch.testing.assert_close(
        outcome(view, plan), torch.tensor([[[0.3 * 2 + 0.7 * 4, 0], [0, 1]]])
    )


def released_vlmpruner(case: dict[str, Any]) -> View:
    """Tokens around a common direction, and keys of two heads."""
    seed, n_tokens = case["seed"], case["tokens"]
    tokens = numbers(seed, 1, n_tokens, 8) + 0.8 * numbers(seed + 100, 1, 1, 8)
    return released_view(LAYER, tokens, 24, visual_keys=numbers(seed + 200, 1, 2, n_tokens, 4))


PICTURES = [((0, 0, 4, 6),), ((0, 0, 3, 8),), ((0, 0, 3, 4), (1, 0, 4, 3))]

test_vlmpruner = check_method(
    "vlmpruner",
    slow_vlmpruner,
    settings=(
        {},
        {"pivot_image_token": 2, "threshold": 0.3, "token_batch": 3, "channels": 6},
    ),
    views=lambda method, _keep: make_view(method, PICTURES),
    keeps=(1, 3, 9, 17, 24),
    released=released_vlmpruner,
    sums_atol=2e-5,
)
