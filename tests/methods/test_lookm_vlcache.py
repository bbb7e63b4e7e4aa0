"""LOOK-M and VL-Cache: formulas on whole attention maps, merges entry by entry, and numbers of released code."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.compressor import CacheView
from espalier.methods.lookm import LookM
from espalier.methods.vlcache import VLCache
from tests.methods.test_compressors import groups, view_of, whole_map
from tests.methods.twins import check_method


def draw(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers that no release of a library changes."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape))


# ---------------------------------------------------------------- LOOK-M


def slow_fold(store: Tensor, keys: Tensor, stays: Tensor, into: Tensor, merging: str) -> Tensor:
    """One head's keys or values (L, D) after merging, entry by entry."""
    arrivals: dict[int, list[Tensor]] = {}
    for entry in range(len(keys)):
        if stays[entry]:
            continue
        likeness = {
            slot: float(cosine_similarity(keys[entry], keys[slot], dim=0))
            for slot in into.nonzero()[:, 0].tolist()
        }
        slot = max(likeness, key=lambda place: (likeness[place], -place))
        share = {"pivot": 0.5, "average": 1.0, "weighted": likeness[slot]}[merging]
        arrival = share * store[entry] + (store[slot] / 2 if merging == "pivot" else 0)
        arrivals.setdefault(slot, []).append(arrival)
    result = store.clone()
    for slot, arrived in arrivals.items():
        result[slot] = (store[slot] + sum(arrived)) / (len(arrived) + 1)
    return result


def slots_of(stays: Tensor) -> Tensor:
    """The slots (H, S) of what stays (H, L)."""
    return torch.stack([head.nonzero()[:, 0] for head in stays])


@pytest.mark.parametrize("targets", ["prompt", "visual"])
@pytest.mark.parametrize("merging", ["pivot", "average", "weighted"])
def test_lookm_merges_each_entry_into_the_most_similar_key(merging: str, targets: str) -> None:
    keys, values = draw(0, 2, 20, 4), draw(1, 2, 20, 5)
    visual = torch.arange(3, 15)
    stays = torch.ones(2, 20, dtype=torch.bool)
    stays[0, [3, 5, 6, 9, 12]] = False
    stays[1, [4, 5, 10, 13, 14]] = False
    folded = LookM(merging=merging, targets=targets).fold(keys, values, slots_of(stays), visual)
    for head in range(2):
        into = stays[head].clone()
        if targets == "visual":
            into[:3] = into[15:] = False
        for entries, store in zip(folded, (keys, values), strict=True):
            expected = slow_fold(store[head], keys[head], stays[head], into, merging)
            kept = stays[head]
            torch.testing.assert_close(entries[head][kept], expected[kept], rtol=0, atol=1e-6)


def test_a_lookm_merge_by_hand() -> None:
    """Entries 1 and 2 go: 1 points as 0 does, and 2 as 3 does. Pivot: (k_0 + (k_0 + k_1) / 2) / 2."""
    keys = torch.tensor([[[4.0, 0.0], [2.0, 0.0], [0.0, 8.0], [0.0, 4.0]]])
    values = torch.tensor([[[1.0], [3.0], [5.0], [9.0]]])
    stays = torch.tensor([[True, False, False, True]])
    pivot = LookM().fold(keys, values, slots_of(stays), torch.tensor([1, 2, 3]))
    assert pivot[0][0, [0, 3]].tolist() == [[3.5, 0.0], [0.0, 5.0]]
    assert pivot[1][0, [0, 3], 0].tolist() == [1.5, 8.0]
    average = LookM(merging="average").fold(keys, values, slots_of(stays), torch.tensor([1, 2, 3]))
    assert average[1][0, [0, 3], 0].tolist() == [2.0, 7.0]
    assert (
        LookM(merging="none").fold(keys, values, slots_of(stays), torch.tensor([1, 2, 3])) is None
    )
    everything = LookM().fold(keys, values, torch.arange(4)[None], torch.tensor([1, 2, 3]))
    assert torch.equal(everything[0], keys)


#: `TextPivotMerge_LayerWise` of SUSTechBruce/LOOK-M, commit ecf0f51, with ratios 0.08 and 0.05 on a prompt of 5 words,
#: 576 visual tokens (the code has that number) and 40 words, two heads of 128: of each head the visual tokens that
#: stay, sums over D of the first six of their keys and values, and the squared lengths of all keys and values.
RELEASED = [
    (
        [*range(27), 29, 30, 32, 39, 45, 49, 53, 54],
        [-9.399, 2.745, -1.887, 0.403, -6.595, 5.841],
        [-0.494, -0.002, 4.177, -9.957, -10.417, -11.005],
        (4885.56, 3614.5),
    ),
    (
        [*range(29), 30, 32, 34, 36, 48, 64],
        [3.124, -9.387, 7.664, 3.426, 8.973, 7.942],
        [0.937, 2.705, -5.491, -12.432, 14.54, 2.782],
        (4811.29, 3583.8),
    ),
]


def test_the_released_lookm_gives_these_entries() -> None:
    queries, keys, values = (draw(seed, 2, 621, 128).float() for seed in (1, 2, 3))
    visual = torch.arange(5, 581)
    view = CacheView(0, queries, keys, 128**-0.5, visual, visual, torch.arange(581, 621))
    method = LookM()
    kept = method.keep(method.score(view), 35)
    assert kept.tolist() == [tokens for tokens, *_ in RELEASED]
    stays = torch.ones(2, 621, dtype=torch.bool)
    stays[:, visual] = False
    stays.scatter_(1, kept + 5, True)
    folded = method.fold(keys, values, slots_of(stays), visual)
    for head, (_, *sums, lengths) in enumerate(RELEASED):
        for store, expected, length in zip(folded, sums, lengths, strict=True):
            left = store[head][stays[head]].double()
            assert (left[5:11].sum(1) - torch.tensor(expected)).abs().max() < 1e-3
            assert abs(float(left.square().sum()) - length) < 0.01


# ---------------------------------------------------------------- VL-Cache


def slow_vlcache(method: VLCache, view: CacheView) -> Tensor:
    """What words pay, in sum the density of the layer."""
    rows = whole_map(view)[:, view.words]
    counted = total = 0
    for head in rows:
        for row, place in zip(head.tolist(), view.words.tolist(), strict=True):
            counted += sum(entry >= method.p * max(row) for entry in row[: place + 1])
            total += place + 1
    votes = rows.sum(1)[:, view.candidates]
    votes = groups(votes) if method.per_head else votes.mean(0, keepdim=True)
    return votes / votes.mean(0).sum() * (counted / total)


test_vlcache = check_method(
    "vlcache",
    slow_vlcache,
    settings=({"p": 0.05, "per_head": True}, {"p": 0.05, "per_head": False}),
    views=lambda _method, _keep: view_of(),
    atol=1e-12,
)


def test_vlcache_budgets_by_hand() -> None:
    """Densities 0.6, 0.3 and 0.1 share 30 of 3 x 20 entries as 18, 9 and 3; the first cannot have more than 20."""
    layers = [torch.full((2, 20), density / 20) for density in (0.6, 0.3, 0.1)]
    assert VLCache().allocate(layers, 30).tolist() == [18, 9, 3]
    assert VLCache().allocate(layers, 40).tolist() == [20, 15, 5]
    # A hundredth of 400 entries is the least: 4 of 60, although 0.02 of them would be 1.
    wide = [torch.full((1, 400), density / 400) for density in (0.58, 0.4, 0.02)]
    assert VLCache().allocate(wide, 60).tolist()[2] == 4
    assert VLCache(allocation="uniform").allocate(layers, 30).tolist() == [10, 10, 10]


#: `VlCacheKVCluster` of EffiVLM-Bench/EffiVLM-Bench, commit ab3ee18, on the four layers of the next test at a budget of
#: 0.4: sparsity of each, share of entries, and each KV head's six best visual entries.
COMPARED = [
    (0.0, 0.8332729),
    (0.4166667, 0.4860759),
    (0.7508680, 0.2075949),
    (0.9123264, 0.0730560),
]
BEST = [
    ([5, 21, 16, 3, 12, 10], [15, 20, 6, 16, 23, 5]),
    ([19, 11, 9, 23, 5, 1], [6, 10, 22, 8, 1, 11]),
    ([0, 8, 5, 7, 9, 23], [14, 5, 20, 1, 3, 19]),
    ([5, 4, 7, 13, 14, 19], [23, 11, 5, 19, 7, 18]),
]


def test_vlcache_finds_what_code_for_comparisons_finds() -> None:
    visual, words, method = torch.arange(3, 27), torch.arange(27, 36), VLCache()
    density = []
    for seed, sharpness in enumerate((0.5, 2.0, 4.0, 8.0)):
        noise = torch.Generator().manual_seed(seed)
        queries = sharpness * torch.randn(4, 36, 8, generator=noise, dtype=torch.float64)
        keys = torch.randn(2, 36, 8, generator=noise, dtype=torch.float64)
        scores = method.score(CacheView(0, queries, keys, 8**-0.5, visual, visual, words))
        ranked = scores.argsort(dim=1, descending=True, stable=True)
        assert ranked[:, :6].tolist() == list(BEST[seed])
        density.append(float(scores.mean(0).sum()))
    for layer_density, (sparsity, share) in zip(density, COMPARED, strict=True):
        assert math.isclose(1 - layer_density, sparsity, abs_tol=1e-6)
        assert math.isclose(layer_density / sum(density) * 0.4 * 4, share, abs_tol=1e-6)


def test_vlcache_of_even_attention_counts_every_entry() -> None:
    view = view_of()
    blind = replace(view, keys=torch.zeros_like(view.keys))
    assert math.isclose(float(VLCache().score(blind).mean(0).sum()), 1.0)
