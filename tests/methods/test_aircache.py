"""AirCache on prompts of several pictures: which words vote, and which picture's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from espalier.methods.aircache import AirCache
from espalier.methods.compressor import CacheView
from tests.methods.test_compressors import HEADS, built, view_of


def two_pictures() -> CacheView:
    """Some words, a picture, some words, a second picture, the question."""
    visual = torch.cat([torch.arange(4, 14), torch.arange(20, 34)])
    pictures = torch.tensor([0] * 10 + [1] * 14)
    view = replace(view_of(), candidates=visual, visual=visual, pictures=pictures)
    return replace(view, between=torch.arange(14, 20))


@pytest.mark.parametrize("text", ["behind", "between"])
@pytest.mark.parametrize("window", ["elite", "all", "continuous"])
def test_words_between_pictures_vote_where_they_are_part_of_the_instruction(
    window: str, text: str
) -> None:
    view = two_pictures()
    method = built("aircache", window=window, size=14, alpha=0.5, text=text)
    words = [*(range(14, 20) if text == "between" else ()), *view.words.tolist()]
    members = words[-14:] if window == "continuous" else words
    if window == "elite":
        row = torch.zeros(len(words), dtype=torch.float64)
        for head in range(HEADS):
            keys = view.keys[head // 3][words]
            row += (keys @ view.queries[head, words[-1]] * view.scaling).softmax(0) / HEADS
        members = [slot for slot, paid in zip(words, row, strict=True) if paid >= 0.5 * row.max()]
    expected = torch.zeros(len(view.visual), dtype=torch.float64)
    for head in range(HEADS):
        for slot in members:
            # A word reads no key behind it: none of the second picture, and no later word.
            before = [one for one in view.visual.tolist() if one <= slot]
            seen = [*before, *(other for other in members if other <= slot)]
            products = view.keys[head // 3][seen] @ view.queries[head, slot] * view.scaling
            expected[: len(before)] += products.softmax(0)[: len(before)] / len(members) / HEADS
    torch.testing.assert_close(method.score(view)[0], expected, rtol=0, atol=1e-12)
    # Of a single picture there is no such text, and nothing moves.
    assert torch.equal(
        built("aircache").score(view_of()), built("aircache", text=text).score(view_of())
    )


@pytest.mark.parametrize("size", [4, 14, 32])
def test_a_visual_window_is_of_the_last_picture_alone(size: int) -> None:
    view = two_pictures()
    observers = AirCache(window="visual", size=size).observers(view)
    assert observers.tolist() == list(range(34 - min(size, 14), 34))
    alone = replace(view, pictures=None)
    assert len(AirCache(window="visual", size=size).observers(alone)) == min(size, 24)
