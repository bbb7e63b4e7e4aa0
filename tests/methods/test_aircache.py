"""AirCache on prompts of several pictures: which words vote, and which picture's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from espalier.methods.aircache import AirCache
from espalier.methods.compressor import CacheView
from tests.methods.test_compressors import HEADS, built, groups, view_of
from tests.methods.twins import check_method


def two_pictures() -> CacheView:
    """Some words, a picture, some words, a second picture, the question."""
    visual = torch.cat([torch.arange(4, 14), torch.arange(20, 34)])
    pictures = torch.tensor([0] * 10 + [1] * 14)
    view = replace(view_of(), candidates=visual, visual=visual, pictures=pictures)
    return replace(view, between=torch.arange(14, 20))


def elite_words(view: CacheView, words: list[int]) -> list[int]:
    """The words to which the last one pays half of the most that it pays to any."""
    row = torch.zeros(len(words), dtype=torch.float64)
    for head in range(HEADS):
        keys = view.keys[head // 3][words]
        row += (keys @ view.queries[head, words[-1]] * view.scaling).softmax(0) / HEADS
    return [slot for slot, paid in zip(words, row, strict=True) if paid >= 0.5 * row.max()]


def slow_aircache(method: AirCache, view: CacheView) -> Tensor:
    """What words pay to visual entries, each over the visual keys and the words that stand before it.

    Between pictures they vote where they are part of the instruction.
    """
    between = [] if view.between is None or method.text == "behind" else view.between.tolist()
    words = [*between, *view.words.tolist()]
    elite = elite_words(view, words)
    assert 1 < len(elite) < len(words)
    windows = {"elite": elite, "all": words, "continuous": words[-method.size :]}
    members = windows.get(method.window, view.visual[-method.size :].tolist())
    votes = torch.zeros(HEADS, len(view.visual), dtype=torch.float64)
    for head in range(HEADS):
        for slot in members:
            before = [place for place in view.visual.tolist() if place <= slot]
            read = [*before, *(other for other in members if other <= slot and other not in before)]
            products = view.keys[head // 3][read] @ view.queries[head, slot] * view.scaling
            votes[head, : len(before)] += products.softmax(0)[: len(before)] / len(members)
    return groups(votes) if method.per_head else votes.mean(0, keepdim=True)


def windows(**more: object) -> list[dict[str, object]]:
    return [
        {"window": window, "per_head": per_head, "alpha": 0.5, **more}
        for window in ("elite", "all", "continuous")
        for per_head in (False, True)
    ]


test_aircache = check_method(
    "aircache",
    slow_aircache,
    settings=[*windows(size=5), {"window": "visual", "size": 4}],
    views=lambda _method, _keep: view_of(),
    atol=1e-12,
)

test_aircache_of_two_pictures = check_method(
    "aircache",
    slow_aircache,
    settings=windows(size=14, text="behind") + windows(size=14, text="between"),
    views=lambda _method, _keep: two_pictures(),
    atol=1e-12,
)


@pytest.mark.parametrize("text", ["behind", "between"])
def test_of_a_single_picture_there_is_no_text_between(text: str) -> None:
    alone = built("aircache", text=text).score(view_of())
    assert torch.equal(built("aircache").score(view_of()), alone)


@pytest.mark.parametrize("size", [4, 14, 32])
def test_a_visual_window_is_of_the_last_picture_alone(size: int) -> None:
    view = two_pictures()
    observers = AirCache(window="visual", size=size).observers(view)
    assert observers.tolist() == list(range(34 - min(size, 14), 34))
    alone = replace(view, pictures=None)
    assert len(AirCache(window="visual", size=size).observers(alone)) == min(size, 24)
