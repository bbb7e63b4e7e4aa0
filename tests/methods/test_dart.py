"""DART against a slow reference and what the paper's code keeps."""

from __future__ import annotations

import torch

from espalier.methods.base import View
from espalier.methods.dart import DART
from tests.methods.cases import SQUARE, make_view, replaced
from tests.methods.twins import check_method


def slow_dart(method: DART, view: View, row: int, keep: int) -> list[int]:
    """Kept indices, pivot by pivot."""
    signals = {key: value[row].double() for key, value in view.signals.items()}
    n = view.tokens.shape[1]

    def by_norm(keys: torch.Tensor, some: list[int]) -> list[int]:
        return sorted(some, key=lambda i: (-float(keys[:, i].abs().sum()), i))

    last = signals["visual_positions"].max()
    words = [t for t, place in enumerate(signals["text_positions"]) if place > last]
    visual = by_norm(signals["visual_keys"], list(range(n)))[: min(method.pivot_image_token, keep)]
    text = by_norm(signals["text_keys"], words)[: method.pivot_text_token]
    pivots = [signals["normed"][i] for i in visual] + [signals["text_normed"][t] for t in text]
    kept, total = list(visual), keep - len(visual)
    for number, pivot in enumerate(pivots):
        quota = total // len(pivots) + (number < total % len(pivots))
        likeness = {
            j: float(torch.cosine_similarity(pivot, signals["normed"][j], dim=0))
            for j in range(n)
            if j not in kept
        }
        kept += sorted(likeness, key=lambda j: (likeness[j], j))[:quota]
    return sorted(kept)


def with_few_words(view: View) -> View:
    """Row 1 has two words behind the image, less than there are pivots."""
    signals = {key: view.signals[key].clone() for key in ("text_keys", "text_normed")}
    signals["text_keys"][1, :, 5:] = 0
    signals["text_normed"][1, 5:] = 0
    places = view.signals["text_positions"].clone()
    places[1, 5:] = -1
    return replaced(view, **signals, text_positions=places)


test_dart = check_method(
    "dart",
    slow_dart,
    settings=({}, {"pivot_image_token": 10, "pivot_text_token": 5}),
    views=lambda method, keep: with_few_words(make_view(method, SQUARE * 3, seed=keep)),
    keeps=(1, 3, 4, 5, 11, 12, 36, 100, 143, 144),
)

#: Four pivots and eight equal choices: asked for T = 192, 128, 64, the released code keeps 4 + 8 floor(T / 8).
test_dart_where_the_released_count_divides = check_method(
    "dart",
    slow_dart,
    views=lambda method, _keep: make_view(method, [((0, 0, 24, 24),)]),
    keeps=(196, 132, 68),
)
