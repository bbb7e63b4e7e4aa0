"""AirCache on prompts of several pictures: which words vote, and which picture's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from espalier.methods.aircache import AirCache
from espalier.methods.compressor import CacheView
from tests.methods.test_compressors import HEADS, built, groups, view_of


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


def slow_votes(view: CacheView, members: list[int]) -> Tensor:
    """What words pay to visual entries (H, V), each over the visual keys and the words that stand before it."""
    votes = torch.zeros(HEADS, len(view.visual), dtype=torch.float64)
    for head in range(HEADS):
        for slot in members:
            before = [place for place in view.visual.tolist() if place <= slot]
            read = [*before, *(other for other in members if other <= slot)]
            products = view.keys[head // 3][read] @ view.queries[head, slot] * view.scaling
            votes[head, : len(before)] += products.softmax(0)[: len(before)] / len(members)
    return votes


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("window", ["elite", "all", "continuous"])
@pytest.mark.parametrize("text", ["one picture", "behind", "between"])
def test_words_vote_over_visual_and_window_keys_alone(
    text: str, window: str, per_head: bool
) -> None:
    """Between pictures they do where they are part of the instruction."""
    several = text != "one picture"
    view, size = (two_pictures(), 14) if several else (view_of(), 5)
    read = {"text": text} if several else {}
    method = built("aircache", window=window, size=size, alpha=0.5, per_head=per_head, **read)
    words = [*(range(14, 20) if text == "between" else ()), *view.words.tolist()]
    members = {"elite": elite_words(view, words), "all": words, "continuous": words[-size:]}
    assert 1 < len(members["elite"]) < len(words)
    votes = slow_votes(view, members[window])
    expected = groups(votes) if per_head else votes.mean(0, keepdim=True)
    torch.testing.assert_close(method.score(view), expected, rtol=0, atol=1e-12)
    # Of a single picture there is no text between, and nothing moves.
    alone = built("aircache", **read).score(view_of())
    assert torch.equal(built("aircache").score(view_of()), alone)


@pytest.mark.parametrize("size", [4, 14, 32])
def test_a_visual_window_is_of_the_last_picture_alone(size: int) -> None:
    view = two_pictures()
    observers = AirCache(window="visual", size=size).observers(view)
    assert observers.tolist() == list(range(34 - min(size, 14), 34))
    alone = replace(view, pictures=None)
    assert len(AirCache(window="visual", size=size).observers(alone)) == min(size, 24)
