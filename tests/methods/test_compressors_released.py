"""Layer budgets as released code has them, against its steps written out one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from espalier.harness.engine.prefill import merge_into
from espalier.methods.compressor import CacheView
from tests.methods.test_compressors import built

#: Mean entries of a layer, and candidates: also those on either side of 2 mean, and of it without the window.
PYRAMIDS = [
    *((120, 4000), (120, 200), (40, 60), (5, 144), (1, 144)),
    *((120, 231), (120, 232), (120, 235), (120, 239), (120, 240), (120, 241)),
]


def released_pyramid(mean: int, n: int, depth: int, window: int, beta: int = 20) -> list[int]:
    """Entries of each layer, the window aside, step by step."""
    if n + window < 2 * mean:
        return [mean] * depth
    low = mean // beta
    high = mean * 2 - low
    if high >= n:
        high = n
        low = mean * 2 - high
    steps = (high - low) // (depth - 1)
    return [high - layer * steps for layer in range(depth)]


@pytest.mark.parametrize("depth", [2, 6, 28, 32])
@pytest.mark.parametrize(("mean", "n"), PYRAMIDS)
def test_whole_steps_are_the_released_ones(depth: int, mean: int, n: int) -> None:
    method = built("pyramidkv", whole_steps=True)
    sizes = method.allocate([torch.zeros(1, n)] * depth, mean * depth)
    expected = [max(1, size) for size in released_pyramid(mean, n, depth, window=8)]
    assert sizes.tolist() == expected
    assert 0 <= sum(expected) - mean * depth <= method.slack(depth)


def test_the_released_pyramid_overshoots_by_as_much_as_was_published() -> None:
    """128 entries with a window of 8 in 32 layers become 133.5 on average."""
    layers = [torch.zeros(1, 4000)] * 32
    sizes = built("pyramidkv", whole_steps=True).allocate(layers, 120 * 32)
    assert float(sizes.double().mean()) + 8 == 133.5
    assert int(built("pyramidkv").allocate(layers, 120 * 32).sum()) == 120 * 32
    assert built("pyramidkv").slack(32) == 0


def test_layers_of_different_lengths_share_exactly() -> None:
    layers = [torch.zeros(1, 40)] * 2 + [torch.zeros(1, 20)] * 4
    assert int(built("pyramidkv", whole_steps=True).allocate(layers, 80).sum()) == 80


def released_prefix(scores: list[list[float]], total: int) -> list[int]:
    """Entries of each layer, two protected ones included: forgotten ones are searched for, scaled, and cut off."""
    target = sum(map(len, scores)) - total
    low, high, forgotten = 0.0, 1.0, [0] * len(scores)
    for _ in range(50):
        p = (low + high) / 2
        forgotten = []
        for layer in scores:
            ranked, whole = sorted(layer, reverse=True), sum(layer)
            held, count = 0.0, 0
            while count < len(layer) and (count == 0 or held / whole < p):
                held += ranked[count]
                count += 1
            forgotten.append(max(0, len(layer) - count - 2))
        if abs(sum(forgotten) - target) < 5:
            break
        if sum(forgotten) > target:
            low = p
        else:
            high = p
    scale = target / max(sum(forgotten), 1)
    return [
        max(min(2, len(layer)), len(layer) - int(gone * scale))
        for layer, gone in zip(scores, forgotten, strict=True)
    ]


def uneven(seed: int, depth: int, n: int) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [
        torch.rand(1, n, generator=noise, dtype=torch.float64) ** (1 + layer)
        for layer in range(depth)
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 8), st.integers(6, 60), st.floats(0.05, 0.95))
def test_the_truncated_search_is_the_released_one(
    seed: int, depth: int, n: int, share: float
) -> None:
    layers, method = uneven(seed, depth, n), built("prefixkv", truncated=True)
    total = max(depth, round(share * depth * n))
    sizes = method.allocate(layers, total)
    assert sizes.tolist() == released_prefix([layer[0].tolist() for layer in layers], total)
    assert 0 <= int(sizes.sum()) - total <= method.slack(depth)


def test_the_truncated_search_misses_the_budget_and_ends_where_layers_are_alike() -> None:
    layers, method = uneven(1, 8, 60), built("prefixkv", truncated=True)
    totals = range(40, 400, 9)
    assert any(int(method.allocate(layers, total).sum()) > total for total in totals)
    assert all(int(built("prefixkv").allocate(layers, total).sum()) == total for total in totals)
    # Sixteen layers that are all alike lose sixteen entries at once: no threshold comes within five.
    alike = [torch.rand(1, 30, generator=torch.Generator().manual_seed(0))] * 16
    for total in (100, 136, 200):
        assert 0 <= int(method.allocate(alike, total).sum()) - total <= method.slack(16)


def test_the_ends_of_a_released_prefix_stay_whatever_their_scores() -> None:
    method = built("prefixkv", truncated=True)
    scores = torch.tensor([[0.0, 5, 1, 4, 2, 3, 0]])
    assert method.keep(scores, 4).tolist() == [[0, 1, 3, 6]]
    assert method.keep(scores, 2).tolist() == [[0, 6]]
    assert built("prefixkv").keep(scores, 4).tolist() == [[1, 3, 4, 5]]
    # They are counted among what may go, as the released code counts the whole prompt.
    assert (method.exempt, built("prefixkv").exempt) == ((0, 0), (1, 1))
    for n in (1, 2):
        assert method.allocate([torch.rand(1, n)] * 4, 4).tolist() == [min(n, 2)] * 4


def released_merge(scores: list[float], store: Tensor, gone: int) -> tuple[list[int], Tensor]:
    """The slots that stay, the first and the last protected, and what (L, D) entries become of them, step by step."""
    length = len(scores)
    inner = scores[1 : length - 1]
    order = sorted(range(len(inner)), key=lambda place: inner[place])
    stays = [place + 1 for place, index in enumerate(order) if index >= gone]
    leaves = [place for place, index in enumerate(order) if index < gone]
    taken: dict[int, list[int]] = {slot: [slot] for slot in stays}
    for place in leaves:  # counted from the first slot that is not protected, and read as a slot
        nearest = min(stays, key=lambda slot: (abs(slot - place), slot))
        taken[nearest].append(place)
    means = {
        slot: torch.stack([store[entry] for entry in slots]).mean(0)
        for slot, slots in taken.items()
    }
    kept = [0, *stays, length - 1]
    return kept, torch.stack([means.get(slot, store[slot]) for slot in kept])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(5, 40), st.floats(0.05, 0.95))
def test_the_released_merge_takes_the_entry_before_each_that_goes(
    seed: int, length: int, share: float
) -> None:
    noise = torch.Generator().manual_seed(seed)
    method = built("elastic", scope="prompt", argsort_as_rank=True, shifted_merge=True)
    queries, keys, values = torch.randn(3, 2, length, 4, generator=noise, dtype=torch.float64)
    candidates = torch.arange(1, length - 1)
    kept_count = max(1, round(share * len(candidates)))
    words = torch.arange(length - 2, length)
    view = CacheView(0, queries, keys, 0.5, candidates, candidates[:2], words)
    true = built("elastic", scope="prompt").score(replace(view, candidates=torch.arange(length)))
    scores = method.score(view)
    kept = method.keep(scores, kept_count)
    onto = method.merge(scores, kept)
    for store in (keys, values):
        slots, expected = released_merge(true[0].tolist(), store[0], len(candidates) - kept_count)
        assert [0, *candidates[kept[0]].tolist(), length - 1] == slots
        merged = store.clone()
        if onto is not None:
            merge_into(merged, candidates, onto, method.merge_shift)
        torch.testing.assert_close(merged[0, slots], expected)


@pytest.mark.parametrize("name", ["h2o", "snapkv", "pyramidkv"])
def test_repeated_heads_choose_as_if_each_had_a_key_head_of_its_own(name: str) -> None:
    noise = torch.Generator().manual_seed(0)
    visual = torch.arange(2, 30)
    queries = torch.randn(6, 40, 8, generator=noise)
    keys = torch.randn(2, 40, 8, generator=noise)

    def view(keys: Tensor) -> CacheView:
        return CacheView(0, queries, keys, 8**-0.5, visual, visual, torch.arange(30, 40))

    repeated = built(name, repeated=True)
    assert repeated.repeats_heads
    assert not built(name).repeats_heads
    scores = repeated.score(view(keys))
    assert scores.shape == (6, 28)
    # What the released code does: copies first, then every head is its own group.
    torch.testing.assert_close(scores, built(name).score(view(keys.repeat_interleave(3, 0))))
    chosen = [{tuple(row.tolist()) for row in repeated.keep(scores, 5)[g : g + 3]} for g in (0, 3)]
    assert max(map(len, chosen)) > 1, "heads of a group choose apart"
