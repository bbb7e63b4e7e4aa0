"""HoloV against a slow version of both readings, by hand, on models, and against what its released code keeps."""

from __future__ import annotations

from typing import Any

import torch

from espalier.methods.base import View
from espalier.methods.holov import HoloV
from espalier.methods.select.tiles import regions
from tests.methods.cases import PREFIX
from tests.methods.crop_views import slow_apportion
from tests.methods.released import released_view
from tests.methods.twins import attended_case, check_method

OFFICIAL = {"alpha": 0.09, "cut": "runs", "ranking": "attention", "missing": "each"}


def slow_holov(method: HoloV, view: View, row: int, keep: int) -> list[int]:
    attention, tokens = view.signals["cls_attention"][row].double(), view.tokens[row].double()
    n_tokens = len(tokens)
    n_parts = min(method.crops, n_tokens)
    if method.cut == "regions":
        number = regions(view.grid[row : row + 1], n_parts)[0][0].tolist()
        parts = [[i for i in range(n_tokens) if number[i] == c] for c in range(n_parts)]
    else:
        parts = [part.tolist() for part in torch.arange(n_tokens).tensor_split(n_parts)]
    scores, means = {}, []
    for part in parts:
        variance = []
        for i in part:
            like = [
                0.0 if i == j else float(torch.cosine_similarity(tokens[i], tokens[j], dim=0))
                for j in part
            ]
            mean = sum(like) / max(1, len(part) - 1)
            variance.append(sum((value - mean) ** 2 for value in like) / max(1, len(part) - 1))
        saliency = [float(attention[i]) for i in part]
        gamma = sum(saliency) / (sum(variance) + 1e-6 * len(part))
        holistic = [a + method.alpha * gamma * v for a, v in zip(saliency, variance, strict=True)]
        means.append(sum(holistic) / len(part))
        scores.update(
            zip(part, holistic if method.ranking == "holistic" else saliency, strict=True)
        )
    weights = [mean / sum(means) for mean in means]
    quotas = [int(weight * keep + 1e-6) for weight in weights]
    order = sorted(range(n_parts), key=lambda c: (-weights[c], c))
    missing = keep - sum(quotas)
    for c in order[:missing] if method.missing == "each" else order[:1] * missing:
        quotas[c] += 1
    quotas = [min(quota, len(part)) for quota, part in zip(quotas, parts, strict=True)]
    room = [len(part) - quota for quota, part in zip(quotas, parts, strict=True)]
    shares_of_room = [weight * free for weight, free in zip(weights, room, strict=True)]
    if keep > sum(quotas):
        more = slow_apportion(shares_of_room, room, keep - sum(quotas))
        quotas = [quota + extra for quota, extra in zip(quotas, more, strict=True)]
    kept = [
        sorted(part, key=lambda i: (-scores[i], i))[:quota]
        for part, quota in zip(parts, quotas, strict=True)
    ]
    return sorted(i for part in kept for i in part)


def test_two_parts_by_hand():
    """Both have half of the attention, so one token each; in the second, 3 and 5 are opposites, 4 like neither."""
    tokens = torch.tensor([[[1.0, 0], [1, 0], [1, 0], [1, 0], [0, 1], [-1, 0]]])
    attention = torch.tensor([[0.3, 0.1, 0.1, 0.11, 0.3, 0.09]])
    view = released_view(PREFIX, tokens, 6, cls_attention=attention)
    # V of 3 and 5: similarities 0, 0, -1 around -1/2 are 0.375; of 4: 0. gamma = 0.1667 / 0.25, and H_3 = 0.11 + 0.25.
    by_hand = HoloV(crops=2, cut="runs")
    assert by_hand.plan(view, 2).kept.tolist() == [[0, 3]]
    torch.testing.assert_close(
        by_hand.plan(view, 2).scores[0, 3:], torch.tensor([0.36, 0.3, 0.34]), atol=1e-5, rtol=0
    )
    assert HoloV(crops=2, cut="runs", ranking="attention").plan(view, 2).kept.tolist() == [[0, 4]]


def released_holov(case: dict[str, Any]) -> None:
    """Where a part was full the released code has zeros for the rest; here other tokens stand there."""
    kept = HoloV(**OFFICIAL).plan(attended_case(case, PREFIX), case["keep"]).kept[0].tolist()
    assert set(case["kept"]) <= set(kept)
    assert kept == case["kept"] or len(case["kept"]) < case["keep"]


test_holov = check_method(
    "holov",
    slow_holov,
    settings=({}, OFFICIAL, {"crops": 5}, {"crops": 100}),
    keeps=(1, 5, 20, 40, 47, 48),
    released=released_holov,
)
