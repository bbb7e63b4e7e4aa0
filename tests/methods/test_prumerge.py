"""PruMerge and PruMerge+ against slow references, their signals against the model, and in the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from espalier.methods.base import Need, Site, View
from espalier.methods.prumerge import ATTENTION, KEYS, PruMerge, with_uniform
from espalier.methods.select.nearest import nearest
from espalier.methods.select.topk import ranking
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.methods.cases import SQUARE, make_view, replaced
from tests.methods.runs import logits_of, noted
from tests.methods.twins import check_method, outcome


def spread(places: list[int], wanted: int) -> list[int]:
    """`wanted` of the places: the middles of as many equal runs of them."""
    m = len(places)
    return [places[-(-(2 * turn + 1) * m // (2 * wanted)) - 1] for turn in range(wanted)]


def slow_prumerge(method: PruMerge, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """What is kept, and what it becomes, token by token in fp64."""
    a = view.signals[ATTENTION.key][row].double()
    keys = torch.nn.functional.normalize(view.signals[KEYS.key][row].double(), dim=1)
    x = view.tokens[row].double()
    n = len(a)
    n_own = keep - 1 if method.merging == "sum" else keep
    centres = sorted(range(n), key=lambda i: (-float(a[i]), i))[:n_own]
    if method.uniform:
        low, high = a.quantile(0.25), a.quantile(0.75)
        centres = [i for i in centres if a[i] > high + 1.5 * (high - low)]
        rest = [i for i in range(n) if i not in centres]
        centres = centres + (spread(rest, n_own - len(centres)) if n_own > len(centres) else [])
    values = {}
    for i in centres:
        others = sorted(
            (j for j in range(n) if j != i), key=lambda j: (-float(keys[i] @ keys[j]), j)
        )[: method.k]
        if method.merging == "sum":
            values[i] = x[i] + sum(a[j] * x[j] for j in others)
        else:
            total = a[i] + sum(a[j] for j in others)
            values[i] = (a[i] * x[i] + sum(a[j] * x[j] for j in others)) / total
    if method.merging == "sum":
        rest = [j for j in range(n) if j not in centres]
        values[rest[-1]] = sum(a[j] * x[j] for j in rest)
    return values


def with_outliers(view: View, count: int, seed: int = 0) -> View:
    """The view with `count` patches of each row at ten times the attention of the others."""
    generator = torch.Generator().manual_seed(seed)
    attention = 0.005 + 0.002 * torch.rand(view.tokens.shape[:2], generator=generator)
    places = torch.rand(attention.shape, generator=generator).argsort(dim=1)[:, :count]
    return replaced(view, **{ATTENTION.key: attention.scatter_add(1, places, 0.05 + 0 * attention)})


test_prumerge = pytest.mark.sampled(24)(
    check_method(
        "prumerge",
        slow_prumerge,
        settings=[
            {"merging": merging, "uniform": uniform}
            for merging in ("average", "sum")
            for uniform in (False, True)
        ],
        views=lambda method, keep: with_outliers(make_view(method, SQUARE * 2, seed=keep), 9),
        keeps=(1, 2, 14, 36, 100, 143),
    )
)


def test_a_small_case_by_hand():
    """Four patches, k = 1: patch 2 is looked at most, and its key is that of patch 0."""
    signals = {
        ATTENTION.key: torch.tensor([[0.1, 0.2, 0.4, 0.3]]),
        KEYS.key: torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 0.1], [0.1, 3.0]]]),
    }
    tokens = torch.tensor([[[1.0], [10.0], [100.0], [1000.0]]])
    view = replace(make_view(PruMerge(), [((0, 0, 2, 2),)]), tokens=tokens, signals=signals)
    average = PruMerge(k=1).plan(view, 1)
    assert average.kept.tolist() == [[2]]
    assert outcome(view, average).item() == pytest.approx((40 + 0.1) / 0.5)
    added = PruMerge(k=1, merging="sum").plan(view, 2)
    assert added.kept.tolist() == [[2, 3]]
    # Patch 2 and a tenth of patch 0; then what was not kept, at the last place that was not.
    assert outcome(view, added)[0, :, 0].tolist() == pytest.approx([100.1, 0.1 + 2 + 300])


@pytest.mark.parametrize("n_true", [0, 1, 7, 12, 13, 143])
def test_rows_with_other_numbers_of_outliers_get_the_same_count(n_true: int):
    attention = torch.full((3, 144), 0.005)
    attention[0, :4] = attention[1, 100:112] = 1.0
    chosen = with_uniform(attention, ranking(attention), n_true)
    assert chosen.sum(dim=1).tolist() == [n_true] * 3
    assert chosen[1, 100:112].sum() == min(n_true, 12)
    if n_true > 12:
        even = spread([*range(100), *range(112, 144)], n_true - 12)
        assert chosen[1].nonzero().flatten().tolist() == sorted([*range(100, 112), *even])


@pytest.mark.parametrize("k", [0, 1, 4, 9, 30])
def test_nearest_gives_ties_to_the_lower_index(k: int):
    similarity = torch.randint(3, (2, 5, 10), generator=torch.Generator().manual_seed(k)).float()
    centres = torch.tensor([[0, 2, 4, 6, 9], [1, 2, 3, 4, 5]])
    neighbours = nearest(similarity, centres, k)
    for row in range(2):
        for token in range(5):
            others = [j for j in range(10) if j != centres[row, token]]
            best = sorted(others, key=lambda j: (-float(similarity[row, token, j]), j))[:k]
            assert neighbours[row, token].nonzero().flatten().tolist() == sorted(best)


# ---------------------------------------------------------------- signals and engine


@pytest.mark.parametrize(
    ("name", "layer", "number"),
    [("llava", -1, 2), ("llava", None, 1), ("onevision_image", -1, -1)],
)
def test_wide_signals_are_those_of_one_head(name: str, layer: int | None, number: int):
    """The last of three layers, whose output nobody reads, and the one before that, which the projector reads.

    Without a class token it is the attention received; the global view stands first, unit by unit.
    """
    adapter, chat = adapter_of(name), FAMILIES[name].chats[0]
    needs = (Need("wide_cls_attention", layer), Need("wide_tower_keys", layer))
    attention = adapter.tower.encoder.layers[number].self_attn
    with noted(query=attention.q_proj, key=attention.k_proj) as seen:
        (view,) = shown(adapter, [Site("vision")], needs, [chat])
    query, key = seen["query"][0], seen["key"][0]
    rows = logits_of(query, key, 1).softmax(-1)[:, 0]
    extra = int(adapter.facts.class_attention == "token")
    wanted = rows[0, 0, 1:] if extra else rows.mean(1)[0]
    signals = [view.signals[need.key][0, : len(wanted)] for need in needs]
    assert torch.allclose(signals[0], wanted, atol=1e-9)
    assert torch.allclose(signals[1], key[0, extra:], atol=1e-9)
