"""Bipartite matching against pairs counted one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from espalier.methods.select import bipartite
from espalier.methods.select.bipartite import match, merge_pairs, merge_to, shares


def features(n_rows: int, n_tokens: int, seed: int) -> Tensor:
    return torch.randn(n_rows, n_tokens, 8, generator=torch.Generator().manual_seed(seed))


def signs(n_rows: int, n_tokens: int, seed: int) -> Tensor:
    """Features whose cosines are exact quarters, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randint(2, (n_rows, n_tokens, 4), generator=generator) - 1


def slow_cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    return dot / lengths if lengths else 0.0


def slow_pairs(points: list[list[float]]) -> list[tuple[float, int, int]]:
    """For each even place: cosine with its best odd place, itself, and that place; best first."""
    pairs = []
    for a in range(0, len(points), 2):
        best, partner = -2.0, -1
        for b in range(1, len(points), 2):
            cosine = slow_cosine(points[a], points[b])
            if cosine > best:
                best, partner = cosine, b
        pairs.append((best, a, partner))
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1]))


def slow_merge(
    points: list[list[float]], sizes: list[float], keep: int
) -> tuple[list[int], list[int]]:
    """Places that stay, and the slot of each, in rounds over lists of members."""
    groups = {place: [place] for place in range(len(points))}
    while len(groups) > keep:
        places = sorted(groups)
        means = []
        for place in places:
            total = sum(sizes[j] for j in groups[place])
            means.append(
                [
                    sum(sizes[j] * points[j][axis] for j in groups[place]) / total
                    for axis in range(len(points[0]))
                ]
            )
        n_pairs = min(len(places) - keep, len(places) // 2)
        for _, a, b in slow_pairs(means)[:n_pairs]:
            groups[places[b]] += groups.pop(places[a])
    kept = sorted(groups)
    slot = [0] * len(points)
    for number, place in enumerate(kept):
        for member in groups[place]:
            slot[member] = number
    return kept, slot


@pytest.mark.parametrize("make", [features, signs])
@pytest.mark.parametrize("n_tokens", [2, 3, 8, 17, 40])
def test_match_equals_the_slow_one(make, n_tokens: int):
    points = make(3, n_tokens, n_tokens)
    cosine, partner = match(points)
    for row in range(3):
        for best, a, b in slow_pairs(points[row].double().tolist()):
            assert float(cosine[row, a // 2]) == pytest.approx(best, abs=1e-6)
            assert 2 * int(partner[row, a // 2]) + 1 == b


@pytest.mark.parametrize("make", [features, signs])
def test_blocks_of_rows_change_nothing(make, monkeypatch: pytest.MonkeyPatch):
    points = make(2, 41, 0)
    whole = match(points)
    for n_bytes in (1, 7 * 4 * 2 * 20, 8 * 4 * 2 * 20):
        monkeypatch.setattr(bipartite, "BLOCK_BYTES", n_bytes)
        parts = match(points)
        assert torch.allclose(parts[0], whole[0], atol=1e-6)
        assert torch.equal(parts[1], whole[1])


def test_only_a_block_of_similarities_is_held(monkeypatch: pytest.MonkeyPatch):
    """500 bytes are 3 rows of 2 times 20 numbers; seven products cover the 21 tokens at even places."""
    shapes = []
    product = torch.Tensor.__matmul__

    def watched(left: Tensor, right: Tensor) -> Tensor:
        shapes.append((left.shape[0], left.shape[1], right.shape[2]))
        return product(left, right)

    monkeypatch.setattr(bipartite, "BLOCK_BYTES", 500)
    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    match(features(2, 41, 0))
    assert shapes == [(2, 3, 20)] * 7


def test_a_small_case_by_hand():
    """Places 0 and 4 look like 1, place 2 most like 3; two merge: 0 (cosine 1) and 4 (cosine 1), not 2."""
    points = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 3.0], [5.0, 0.0]]])
    cosine, partner = match(points)
    assert partner.tolist() == [[0, 0, 0]]  # 2 is as near to 1 as to 3: the first
    assert cosine[0].tolist() == pytest.approx([1, math.sqrt(0.5), 1])
    kept, slot = merge_pairs(points, 2)
    assert (kept.tolist(), slot.tolist()) == ([[1, 2, 3]], [[0, 0, 1, 2, 0]])
    sizes = torch.tensor([[1.0, 2.0, 4.0, 1.0, 5.0]])
    assert shares(slot, sizes)[0].tolist() == pytest.approx([1 / 8, 2 / 8, 1, 1, 5 / 8])


@pytest.mark.parametrize("make", [features, signs])
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 16, 17])
def test_a_round_equals_the_slow_one(make, n_tokens: int):
    points = make(3, n_tokens, n_tokens)
    for n_pairs in range(n_tokens // 2 + 1):
        if n_tokens == 1:
            continue  # nothing to match
        kept, slot = merge_pairs(points, n_pairs)
        for row in range(3):
            wanted = slow_merge(points[row].double().tolist(), [1.0] * n_tokens, n_tokens - n_pairs)
            assert (kept[row].tolist(), slot[row].tolist()) == wanted


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_rounds_equal_the_slow_ones(keep: int):
    points = features(3, 17, keep)
    sizes = torch.randint(1, 6, (3, 17), generator=torch.Generator().manual_seed(keep)).float()
    kept, slot, _ = merge_to(points, sizes, keep)
    for row in range(3):
        wanted = slow_merge(points[row].double().tolist(), sizes[row].tolist(), keep)
        assert (kept[row].tolist(), slot[row].tolist()) == wanted


@pytest.mark.parametrize(("sizes", "kept"), [((99, 1), [1, 3]), ((1, 99), [3, 5])])
def test_sizes_decide_what_a_second_round_sees(sizes: tuple[int, int], kept: list[int]):
    """0 joins 1, 2 joins 3, 4 joins 5; then 5's group or 1's goes to 3's: 1's if it is more 1 than 0."""
    keys = [[1, 0, 0], [0.3, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0.8, 0.6], [0, 0.8, 0.6]]
    points = torch.tensor([keys], dtype=torch.float32)
    weights = torch.tensor([[*sizes, 1, 1, 1, 1]], dtype=torch.float32)
    assert merge_to(points, weights, 2)[0].tolist() == [kept]


def test_one_token_and_all_tokens_stay_as_they_are():
    kept, slot, _ = merge_to(features(2, 1, 0), torch.ones(2, 1), 1)
    assert (kept.tolist(), slot.tolist()) == ([[0], [0]], [[0], [0]])
    kept, slot, _ = merge_to(features(2, 6, 0), torch.ones(2, 6), 6)
    assert torch.equal(kept, torch.arange(6).expand(2, 6))
    assert torch.equal(slot, kept)
