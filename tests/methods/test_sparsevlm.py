"""SparseVLM against a slow reference: raters, counts, clusters, budgets."""

from __future__ import annotations

import math

import pytest
import torch

from espalier.harness.cost.budget import Budget, equivalent_tokens
from espalier.methods.base import Site, View
from espalier.methods.select.density import density_peaks, squared_distances
from espalier.methods.select.raters import rater_weights
from espalier.methods.select.recycle import split
from espalier.methods.sparsevlm import SparseVLM
from tests.methods.cases import SQUARE, facts_of, make_view, replaced
from tests.methods.slow import peaks
from tests.methods.twins import check_method

# ---------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("n_tokens", "n_top", "n_clusters"),
    [
        (576, 300, 9),
        (309, 200, 4),
        (204, 110, 3),
        (576, 303, 9),
        (312, 110, 7),
        (117, 36, 3),
        (576, 238, 11),
        (249, 48, 7),
        (55, 26, 1),
        (576, 66, 16),
        (82, 30, 2),
        (32, 17, 1),
    ],
)
def test_clusters_follow_from_the_released_counts(n_tokens: int, n_top: int, n_clusters: int):
    top, recycled, clusters = split(n_tokens, n_top + n_clusters, 0.3, 10)
    assert (top, clusters) == (n_top, n_clusters)
    assert recycled == int(0.3 * (n_tokens - n_top)) + 1


@pytest.mark.parametrize("method", [SparseVLM(), SparseVLM(tau=0.9, theta=1), SparseVLM(tau=0.05)])
def test_every_budget_is_met_and_half_of_it_is_kept(method: SparseVLM):
    for n_tokens in (1, 2, 9, 48, 137):
        for keep in range(1, n_tokens + 1):
            top, recycled, clusters = split(n_tokens, keep, method.tau, method.theta)
            assert top + clusters == keep
            assert 0 <= clusters <= recycled <= n_tokens - top
            assert clusters <= keep // 2
            assert (clusters == 0) == (keep in (1, n_tokens))


@pytest.mark.parametrize(
    ("schedule", "average"),
    [
        ((309, 204, 113), 206.5),
        ((312, 117, 39), 145.4),
        ((249, 55, 27), 114.1),
        ((82, 32, 18), 82.25),
    ],
)
def test_the_budget_gives_back_the_released_schedules(schedule: tuple[int, ...], average: float):
    facts = facts_of(32)
    method = SparseVLM(schedule=schedule)
    assert method.sites(32) == (Site("layer", 3), Site("layer", 7), Site("layer", 16))
    exact = equivalent_tokens(method, facts, 576, 40, schedule).average
    assert abs(exact - average) < 0.05
    assert Budget("average", 1 - exact / 576).keep(method, facts, 576, 40) == schedule


# ---------------------------------------------------------------- clustering


def slow_clusters(points: torch.Tensor, n: int) -> tuple[list[int], list[list[float]]]:
    """Centres and squared distances of (M, D) points, as the formulas read, with exp."""
    rows = points.double().tolist()
    squared = [
        [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x) for y in rows] for x in rows
    ]
    return peaks(squared, n, n), squared


def test_far_points_and_equal_points_have_centres_too():
    """Where exp underflows, and where everything is equal: the lower index, never an error."""
    far = 100.0 * torch.randn(1, 12, 4, generator=torch.Generator().manual_seed(0))
    assert len(density_peaks(squared_distances(far), 4, 4)[0].unique()) == 4
    assert density_peaks(squared_distances(torch.ones(1, 12, 4)), 4, 4).tolist() == [[0, 1, 2, 3]]
    # Two pairs: the members of a pair are equally dense whatever rounding does to the product.
    pairs = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1))
    pairs = torch.cat([pairs, pairs + 0.01 * torch.randn_like(pairs)], dim=1)
    assert torch.equal(squared_distances(pairs), squared_distances(pairs).transpose(1, 2))


# ---------------------------------------------------------------- the whole plan


def slow_raters(method: SparseVLM, view: View, row: int) -> list[int]:
    """The words that rate, word by word."""
    signals = {key: value[row].double() for key, value in view.signals.items()}
    last = signals["all_positions"].max()
    words = [t for t, place in enumerate(signals["text_positions"]) if place > last]
    relevance = dict.fromkeys(words, 0.0)
    embedded = [
        e for e, p in zip(signals["all_projected"], signals["all_positions"], strict=True) if p >= 0
    ]
    for visual in embedded:
        exps = {t: math.exp(visual @ signals["text_embeddings"][t]) for t in words}
        for t in words:
            relevance[t] += exps[t] / sum(exps.values()) / len(embedded)
    mean = sum(relevance.values()) / len(words)
    above = method.raters == "above"
    return [t for t in words if (relevance[t] > mean if above else relevance[t] >= mean)]


def slow_sparsevlm(method: SparseVLM, view: View, row: int, keep: int) -> dict[int, torch.Tensor]:
    """What is kept, and what it becomes, token by token; the method has the same raters."""
    attention, raters = view.signals["text_attention"][row].double(), slow_raters(method, view, row)
    assert method.weights(view)[row].nonzero().flatten().tolist() == raters
    assert 0 < len(raters) < 6
    n = view.tokens.shape[1]
    scores = [sum(float(attention[t, j]) for t in raters) for j in range(n)]
    order = sorted(range(n), key=lambda j: (-scores[j], j))
    top, recycled, clusters = split(n, keep, method.tau, method.theta)
    tokens = view.tokens[row].double()
    values = {j: tokens[j] for j in order[:top]}
    if clusters:
        pool = sorted(order[top : top + recycled])
        centres, squared = slow_clusters(tokens[pool], clusters)
        units = torch.nn.functional.normalize(tokens[pool], dim=1)
        members: dict[int, list[int]] = {centre: [centre] for centre in centres}
        for i in (i for i in range(recycled) if i not in centres):
            if method.assignment == "cosine":
                members[max(centres, key=lambda c: float(units[i] @ units[c]))].append(i)
            else:
                members[min(centres, key=lambda c: squared[i][c])].append(i)
        for centre, some in members.items():
            gathered = tokens[[pool[i] for i in some]]
            together = gathered.sum(dim=0) if method.cluster == "sum" else gathered.mean(dim=0)
            values[pool[centre]] = together
    return values


def with_padding(view: View) -> View:
    """Row 1 has two words and 44 of the dropped visual tokens fewer than row 0."""
    signals = {key: value.clone() for key, value in view.signals.items()}
    fewer = {"text_embeddings": 0.0, "text_attention": 0.0, "text_positions": -1}
    for key, filler in fewer.items():
        signals[key][1, -2:] = filler
    earlier = 300 + torch.arange(50)
    n_rows = len(view.tokens)
    projected = torch.randn(n_rows, 50, 16, generator=torch.Generator().manual_seed(5))
    places = earlier.expand(n_rows, -1).clone()
    signals["text_positions"][:, 3:] += 300 * (signals["text_positions"][:, 3:] >= 0)
    projected[1, 6:], places[1, 6:] = 0.0, -1
    signals["all_projected"] = 0.5 * torch.cat([signals["all_projected"], projected], dim=1)
    signals["all_positions"] = torch.cat([signals["all_positions"], places], dim=1)
    return replaced(view, **signals)


test_sparsevlm = check_method(
    "sparsevlm",
    slow_sparsevlm,
    settings=(
        {},
        {"raters": "above", "assignment": "euclidean", "cluster": "mean"},
        {"tau": 0.0},
    ),
    views=lambda method, keep: with_padding(make_view(method, SQUARE * 2, seed=keep)),
    keeps=(1, 2, 5, 20, 70, 143, 144),
    atol=1e-4,
)


# ---------------------------------------------------------------- planted signals


@pytest.mark.parametrize("above", [False, True])
def test_words_that_differ_by_rounding_alone_all_rate(above):
    """Equal words are as relevant as the mean, which sums of fp32 may miss by a little on either side."""
    torch.manual_seed(0)
    for n_words in range(2, 24):
        for n_tokens in (1, 3, 7, 50):
            embedded = torch.randn(1, n_tokens, 8)
            words = torch.randn(1, 1, 8).expand(1, n_words, 8)
            places, after = torch.arange(n_tokens)[None], torch.ones(1, n_words, dtype=torch.bool)
            weights = rater_weights(embedded, places, words, after, above)
            torch.testing.assert_close(weights, torch.full((1, n_words), 1 / n_words))
