"""VisionTrim against a slow version, by hand, on models, and against what its released code keeps and merges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import View
from espalier.methods.visiontrim import VisionTrim
from tests.methods.cases import PREFIX
from tests.methods.released import numbers, released_view, shares
from tests.methods.twins import check_method, outcome, seeded


def slow_visiontrim(method: VisionTrim, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """Token by token: what is kept, and what it becomes."""
    signals = {key: value[row].double() for key, value in view.signals.items()}
    tokens = view.tokens[row].double()
    both = [signals[name] / signals[name].norm() for name in ("cls_attention", "tower_received")]
    score = (both[0] + both[1]).tolist()
    every = range(len(tokens))
    n_dominant = math.floor(method.dominant * keep + 0.5)
    dominant = sorted(every, key=lambda i: -score[i])[:n_dominant]
    words = normalize(signals["text_embeddings"], dim=1)
    likeness = normalize(tokens, dim=1) @ words.T
    others = [i for i in every if i not in dominant]
    centres = sorted(others, key=lambda i: -float(likeness[i].mean()))[: keep - n_dominant]
    values = {i: tokens[i] for i in (*dominant, *centres)}
    for _ in range(method.rounds if centres else 0):
        came: dict[int, list[Tensor]] = {j: [] for j in centres}
        of_centre = {j: words @ normalize(values[j], dim=0) for j in centres}
        for i in others:
            if i not in centres:
                nearest = max(sorted(centres), key=lambda j, i=i: float(likeness[i] @ of_centre[j]))
                came[nearest].append(tokens[i])
        for j, group in came.items():
            if group:
                values[j] = values[j] + torch.stack(group).mean(dim=0)
    return values


def test_six_tokens_by_hand() -> None:
    """Tokens 0 and 5 are dominant; 1 and 3 are like the two words; 2 goes to 1, 4 to 3, and again.

    With two words at right angles the sum over them is the cosine: 2 stays with 1, and 4 with 3, as these grow.
    """
    tokens = torch.tensor([[[0.0, 9], [2, 0], [1, -1], [0, 2], [-1, 1], [-9, -9]]])
    signals = {
        "cls_attention": torch.tensor([[3.0, 1, 1, 1, 1, 0]]),
        "tower_received": torch.tensor([[0.0, 1, 1, 1, 1, 3]]),
        "text_embeddings": torch.tensor([[[5.0, 0], [0, 5]]]),
    }
    view = released_view(PREFIX, tokens, 3, **signals)
    plan = VisionTrim(dominant=0.5).plan(view, 4)
    assert plan.kept.tolist() == [[0, 1, 3, 5]]
    grown = torch.tensor([[0.0, 9], [5, -3], [-3, 5], [-9, -9]])
    torch.testing.assert_close(outcome(view, plan)[0], grown)
    torch.testing.assert_close(
        outcome(view, VisionTrim(dominant=0.5, rounds=1).plan(view, 4))[0],
        torch.tensor([[0.0, 9], [3, -1], [-1, 3], [-9, -9]]),
    )
    # Three quarters: 3 of 4 by attention, the first of the equal ones; and one by words.
    assert VisionTrim().plan(view, 4).kept.tolist() == [[0, 1, 3, 5]]
    assert VisionTrim(dominant=1.0).plan(view, 3).kept.tolist() == [[0, 1, 5]]
    assert VisionTrim(dominant=1.0).plan(view, 3).merge is None


def released_visiontrim(case: dict[str, Any]) -> None:
    """As in the code, a patch pays itself no attention, and `tower_received` lacks the class token's."""
    seed, n_tokens = case["seed"], case["tokens"]
    attention = shares(seed + 200, n_tokens + 1, n_tokens + 1)
    attention = (attention / attention.sum(dim=1, keepdim=True)).fill_diagonal_(0)
    signals = {
        "cls_attention": attention[:1, 1:],
        "tower_received": attention[1:, 1:].mean(dim=0, keepdim=True),
        "text_embeddings": numbers(seed + 100, 1, case["words"], 8),
    }
    tokens = numbers(seed, 1, n_tokens, 8) + 0.5 * numbers(seed + 5, 1, 1, 8)
    view = released_view(PREFIX, tokens, 16, **signals)
    plan = VisionTrim().plan(view, case["keep"])
    kept = plan.kept[0].tolist()
    assert set(case["kept"]) <= set(kept)
    sums = outcome(view, plan)[0].double().sum(dim=1)
    centres = [place for place, token in enumerate(kept) if token not in case["kept"]]
    assert sums[centres].tolist() == pytest.approx(case["sums"], abs=2e-4)


test_visiontrim = check_method(
    "visiontrim",
    slow_visiontrim,
    settings=({}, {"dominant": 0.0}, {"dominant": 0.5, "rounds": 1}),
    views=seeded(),
    keeps=(1, 2, 5, 14, 30, 47),
    released=released_visiontrim,
)
