"""Cache compressors against the published formulas, evaluated on whole attention maps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from espalier.harness.specs.catalogue import build_method, names_of
from espalier.methods.aircache import AirCache, elite
from espalier.methods.base import MethodError
from espalier.methods.chance import NoChance
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.elastic import Elastic
from espalier.methods.select import attention, budgets
from espalier.methods.snapkv import SnapKV
from tests.methods.twins import check_method

HEADS, KV_HEADS, WIDTH = 6, 2, 8
FIRST, VISUAL, WORDS = 4, 30, 12
LENGTH = FIRST + VISUAL + WORDS


def view_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> CacheView:
    """A prompt: some words, the picture, the question."""
    noise = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(heads, LENGTH, WIDTH, generator=noise, dtype=torch.float64).to(dtype)

    visual = torch.arange(FIRST, FIRST + VISUAL)
    return CacheView(
        layer=0,
        queries=2 * draw(HEADS),
        keys=draw(KV_HEADS),
        scaling=WIDTH**-0.5,
        candidates=visual,
        visual=visual,
        words=torch.arange(FIRST + VISUAL, LENGTH),
        chance=[torch.Generator().manual_seed(seed)],
    )


def whole_map(view: CacheView) -> Tensor:
    """The (H, L, L) attention of the prompt, head by head, row by row."""
    weights = torch.zeros(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    for head in range(HEADS):
        keys = view.keys[head // (HEADS // KV_HEADS)].double()
        for row in range(LENGTH):
            products = keys[: row + 1] @ view.queries[head, row].double() * view.scaling
            weights[head, row, : row + 1] = products.softmax(0)
    return weights


def groups(values: Tensor) -> Tensor:
    """The mean over the query heads of each KV head."""
    size = HEADS // KV_HEADS
    return torch.stack([values[g * size : (g + 1) * size].mean(0) for g in range(KV_HEADS)])


def built(name: str, **params: object) -> CacheCompressor:
    return build_method(name, params)


# ------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("block", [1, 7, 256])
def test_rows_are_those_of_the_whole_map(block: int) -> None:
    view, places = view_of(), torch.tensor([3, 11, 40, 45])
    blocks = attention.rows(view.queries, view.keys, view.scaling, places, block)
    rows = torch.cat(
        [pad(block_weights, (0, LENGTH - block_weights.shape[-1])) for block_weights in blocks],
        dim=1,
    )
    torch.testing.assert_close(rows, whole_map(view)[:, places], rtol=0, atol=1e-14)


@pytest.mark.parametrize("tile", [2**20, 150])
def test_rows_in_many_tiles_are_summed_like_the_whole_map(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with every other key alone."""
    monkeypatch.setattr(attention, "TILE", tile)
    view, shared = view_of(), torch.arange(0, LENGTH, 2)
    every = torch.arange(LENGTH)
    for places in (every, None):
        paid = attention.paid(view.queries, view.keys, view.scaling, places, 7)
        torch.testing.assert_close(paid, whole_map(view).sum(1), rtol=0, atol=1e-12)
    keys = view.keys[:, shared]
    one_block, tiles = (
        attention.paid(view.queries, keys, view.scaling, every, block, shared) for block in (256, 7)
    )
    torch.testing.assert_close(tiles, one_block, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_smaller_numbers_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """The states alone are rounded, not what follows from them."""
    view = view_of(dtype=dtype)
    paid = attention.paid(view.queries, view.keys, view.scaling, None, 7)
    torch.testing.assert_close(paid.double(), whole_map(view).sum(1), rtol=2e-6, atol=2e-6)


def slow_received(method: CacheCompressor, view: CacheView) -> Tensor:
    """What all rows pay, by KV head, or one score for all heads."""
    paid = whole_map(view)[:, :, view.candidates].sum(1)
    return groups(paid) if method.by_head else paid.mean(0, keepdim=True)


test_h2o = check_method("h2o", slow_received, views=lambda _method, _keep: view_of(), atol=1e-12)
test_lookm = check_method(
    "lookm", slow_received, views=lambda _method, _keep: view_of(), atol=1e-12
)
test_elastic = check_method(
    "elastic", slow_received, views=lambda _method, _keep: view_of(), atol=1e-12
)
test_prefixkv = check_method(
    "prefixkv", slow_received, views=lambda _method, _keep: view_of(), atol=1e-12
)


test_tova = check_method(
    "tova",
    lambda _method, view: whole_map(view)[:, -1, view.candidates].mean(0, keepdim=True),
    views=lambda _method, _keep: view_of(),
    atol=1e-12,
)


def slow_keydiff(_method: CacheCompressor, view: CacheView) -> Tensor:
    """Against the mean of a head's keys, each of length one."""
    scores = []
    for keys in view.keys:
        anchor = sum(key / key.norm() for key in keys) / LENGTH
        unlike = [-(key @ anchor) / key.norm() / anchor.norm() for key in keys[view.candidates]]
        scores.append(torch.stack(unlike))
    return torch.stack(scores)


test_keydiff = check_method(
    "keydiff", slow_keydiff, views=lambda _method, _keep: view_of(), atol=1e-12
)


def slow_snapkv(method: SnapKV, view: CacheView) -> Tensor:
    """Votes of the last words, pooled place by place."""
    first = LENGTH - min(method.window, WORDS)
    votes = groups(whole_map(view)[:, first:].sum(1))[:, :first]
    scores = torch.zeros(KV_HEADS, VISUAL, dtype=torch.float64)
    for place, slot in enumerate(view.candidates.tolist()):
        near = votes[:, max(0, slot - method.kernel // 2) : slot + method.kernel // 2 + 1]
        mean = method.pooling == "mean"
        scores[:, place] = near.sum(1) / method.kernel if mean else near.amax(1)
    return scores


test_snapkv = check_method(
    "snapkv",
    slow_snapkv,
    settings=[
        {"window": window, "kernel": kernel, "pooling": pooling}
        for window in (3, 8, 500)
        for kernel, pooling in ((1, "mean"), (5, "mean"), (7, "max"))
    ],
    views=lambda _method, _keep: view_of(),
    atol=1e-12,
)

test_pyramidkv = check_method(
    "pyramidkv", slow_snapkv, views=lambda _method, _keep: view_of(), atol=1e-12
)


def test_the_elite_are_those_that_reach_the_threshold() -> None:
    row = torch.tensor([0.02, 0.10, 0.095, 0.085, 0.091, 0.03])
    assert elite(row, 0.9).nonzero()[:, 0].tolist() == [1, 2, 4]
    assert elite(row, 0.0).all()
    assert elite(row, 1.0).nonzero()[:, 0].tolist() == [1]
    assert elite(torch.tensor([0.1, 0.09, 0.1]).double(), 0.9).all()


@pytest.mark.parametrize("name", names_of(CacheCompressor))
def test_scores_are_finite_in_half_precision_and_do_not_move_with_the_whole_prompt(
    name: str,
) -> None:
    method, view = built(name), view_of(dtype=torch.float16)
    scores = method.score(view)
    assert scores.shape == (KV_HEADS if method.by_head else 1, VISUAL)
    assert scores.dtype != torch.float16
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("name", ["h2o", "snapkv", "elastic", "aircache"])
def test_words_may_be_candidates_too(name: str) -> None:
    short = {"h2o": {"recent": 4}, "snapkv": {"window": 6}}.get(name, {})
    view, method = view_of(), built(name, scope="prompt", **short)
    first, last = method.exempt
    scores = method.score(replace(view, candidates=torch.arange(first, LENGTH - last)))
    assert scores.shape[-1] == LENGTH - first - last
    if name in ("h2o", "elastic"):
        torch.testing.assert_close(scores[:, FIRST - first :][:, :VISUAL], built(name).score(view))


# ------------------------------------------------------------------------------------ budgets

#: Three layers of eight importances with a mean budget of a quarter, worked out by hand from equations (9) to (11).
ROWS = (
    (0.30, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02, 0.02),
    (0.1, 0.1, 0.08, 0.08, 0.08, 0.08, 0.04, 0.04),
    (0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.5),
)


def test_aircaches_budgets_by_hand() -> None:
    layers = [torch.tensor([row], dtype=torch.float64) for row in ROWS]
    skews = [float(budgets.skew(layer[0])) for layer in layers]
    assert skews == pytest.approx([2.721947, -0.813216, 2.828427], abs=1e-6)
    strengths = budgets.strength(layers, 2)
    assert strengths.tolist() == pytest.approx([0.862069, 1.034483, 1.103448], abs=1e-6)
    strengths = budgets.skewness(layers, 2)
    assert strengths.tolist() == pytest.approx([1.471224, 0, 1.528776], abs=1e-6)
    combined = budgets.strength_and_skewness(layers, 2)
    assert (combined / 4).tolist() == pytest.approx([0.291662, 0.129310, 0.329028], abs=1e-6)
    # 2.333, 1.034 and 2.632 of 8 entries.
    assert AirCache().allocate(layers, 6).tolist() == [2, 1, 3]


def test_layers_that_are_all_alike_share_alike() -> None:
    layers = [torch.full((1, 8), 0.1)] * 4
    for rule in budgets.RULES:
        if rule != "pyramid":
            assert built("h2o", allocation=rule).allocate(layers, 12).tolist() == [3] * 4, rule


def test_a_pyramid_falls_to_a_twentieth_and_adds_up() -> None:
    allocated = built("pyramidkv").allocate([torch.zeros(1, 4000)] * 32, 128 * 32)
    assert int(allocated.sum()) == 128 * 32
    assert (allocated[0], allocated[-1]) == (250, 6)
    assert (allocated.diff() <= 0).all()
    # No layer has more entries than there are: the slope flattens.
    allocated = built("pyramidkv").allocate([torch.zeros(1, 200)] * 32, 128 * 32)
    assert int(allocated.sum()) == 128 * 32
    assert (allocated[0], allocated[-1]) == (200, 56)


def test_one_threshold_retains_the_same_part_of_every_layer() -> None:
    noise = torch.Generator().manual_seed(3)
    layers = [torch.rand(1, 400, generator=noise).double() ** power for power in (0.1, 1, 6, 20)]
    allocated = built("prefixkv").allocate(layers, 400)
    assert int(allocated.sum()) == 400
    parts, steps = [], []
    for layer, n in zip(layers, allocated.tolist(), strict=True):
        ranked = layer[0].sort(descending=True).values / layer.sum()
        parts.append(float(ranked[:n].sum()))
        steps.append(float(ranked[n - 1]))
    # As alike as whole entries allow.
    assert max(parts) - min(parts) <= max(steps)
    assert allocated.tolist() == sorted(allocated.tolist(), reverse=True)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(0, 40),
)
def test_entries_add_up_within_their_bounds(shares: list[float], keep: int, extra: int) -> None:
    given_shares, limit = torch.tensor(shares, dtype=torch.float64), keep + extra
    if float(given_shares.sum()) == 0:
        given_shares += 1
    given_shares /= given_shares.mean()
    allocated = budgets.entries(given_shares, keep * len(shares), [limit] * len(shares))
    assert int(allocated.sum()) == keep * len(shares)
    assert int(allocated.min()) >= 1
    assert int(allocated.max()) <= limit
    # A layer with a larger share never has less than one with a smaller share, but for the rounding.
    assert (allocated[given_shares.argsort()].diff() >= -1).all()


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1 / 7, 0.1])
@pytest.mark.parametrize(
    ("shares", "total", "allocated"),
    [
        ([0.5, 1.25, 1.25, 1.0], 32, [4, 10, 10, 8]),
        ([0.97, 1.03], 20, [10, 10]),
        ([0.9, 1.1], 20, [9, 11]),
        # 1.5, 6.5, 3.5 and 8.5: equal remainders go to the first layers, whatever the last bit of the sum.
        ([0.3, 1.3, 0.7, 1.7], 20, [2, 7, 3, 8]),
    ],
)
def test_where_no_bound_holds_entries_are_the_rounded_shares(
    shares: list[float], total: int, allocated: list[int], scale: float
) -> None:
    scaled = torch.tensor(shares, dtype=torch.float64) * scale
    assert budgets.entries(scaled, total, [100] * len(shares)).tolist() == allocated


# ------------------------------------------------------------------------------------ merging


def test_what_goes_is_averaged_into_the_nearest_that_stays() -> None:
    scores = torch.tensor([[9.0, 1, 2, 3, 8, 4, 5]])
    kept = torch.tensor([[0, 4]])
    assert Elastic().merge(scores, kept).tolist() == [[0, 0, 0, 4, 4, 4, 4]]
    # Of five that go the two best are the last ones.
    assert Elastic(merged=0.4).merge(scores, kept).tolist() == [[0, -1, -1, -1, 4, 4, 4]]
    assert Elastic(merged=0.0).merge(scores, kept) is None


def test_each_head_merges_into_what_it_keeps() -> None:
    scores = torch.tensor([[9.0, 1, 2, 3, 8], [1.0, 9, 2, 3, 4]])
    kept = torch.tensor([[0, 4], [1, 3]])
    targets = AirCache(per_head=True, merged=1.0).merge(scores, kept)
    assert targets.tolist() == [[0, 0, 0, 4, 4], [1, 1, 1, 3, 3]]
    half = AirCache(per_head=True, merged=0.5).merge(scores, kept)
    assert half.tolist() == [[0, -1, 0, 4, 4], [-1, 1, 1, 3, 3]]
    assert AirCache().merge(scores, kept) is None


def test_the_released_ranks_are_the_values_of_an_argsort() -> None:
    view = view_of()
    true = built("elastic").score(view)[0]
    ranks = built("elastic", argsort_as_rank=True).score(view)[0]
    assert ranks.tolist() == true.argsort(stable=True).tolist()
    assert ranks.argsort().tolist() != true.argsort().tolist()


# ------------------------------------------------------------------------------------ controls


def slow_uniform_kv(_method: CacheCompressor, view: CacheView) -> Tensor:
    """Places by their binary digits read from the end, the first the highest."""
    n = len(view.candidates)
    order = sorted(range(n), key=lambda place: f"{place:0{(n - 1).bit_length()}b}"[::-1])
    return torch.tensor([[float(n - order.index(place)) for place in range(n)]])


test_random_kv = check_method(
    "random_kv",
    lambda _method, view: torch.rand(1, VISUAL, generator=torch.Generator().manual_seed(0)),
    views=lambda _method, _keep: view_of(),
    atol=0,
)
test_recent_kv = check_method(
    "recent_kv",
    lambda _method, view: torch.tensor([[float(slot) for slot in view.candidates]]),
    views=lambda _method, _keep: view_of(),
    atol=0,
)
test_uniform_kv = check_method(
    "uniform_kv", slow_uniform_kv, views=lambda _method, _keep: view_of(), atol=0
)


def test_controls() -> None:
    view = view_of()
    first, second = built("random_kv").score(view), built("random_kv").score(view)
    assert not torch.equal(first, second), "each layer draws anew"
    with pytest.raises(MethodError, match=r"draws random numbers .* valid: `draws = True`"):
        built("random_kv").score(replace(view, chance=NoChance("RandomKV")))
    scores = built("uniform_kv").score(replace(view, candidates=torch.arange(32)))[0]
    for keep in (2, 4, 8, 16):
        kept = scores.argsort(descending=True)[:keep].sort().values
        assert kept.diff().unique().tolist() == [32 // keep]


def test_every_score_goes_with_every_allocation() -> None:
    view = view_of()
    for name in names_of(CacheCompressor):
        for rule in budgets.RULES:
            method = built(name, allocation=rule)
            scores = [method.score(replace(view, layer=layer)) for layer in range(3)]
            allocated = method.allocate(scores, 20)
            assert int(allocated.sum()) == 20, (name, rule)
            kept = method.keep(scores[0], int(allocated[0]))
            assert kept.shape == (scores[0].shape[0], int(allocated[0]))
