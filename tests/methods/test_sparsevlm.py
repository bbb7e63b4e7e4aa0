"""SparseVLM against a slow reference: raters, counts, clusters, budgets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from espalier.harness.cost.budget import Budget, equivalent_tokens
from espalier.methods.base import MethodError, Site, TokenReducer, View
from espalier.methods.dart import DART
from espalier.methods.select.density import density_peaks, nearest_centre, squared_distances
from espalier.methods.select.raters import rater_weights
from espalier.methods.select.recycle import split
from espalier.methods.sparsevlm import SparseVLM
from tests.methods.cases import make_view, replaced
from tests.methods.engine import check_method
from tests.methods.twins import check_slow
from tests.tiny import tiny_spec

OFFICIAL = SparseVLM(raters="above", assignment="euclidean", cluster="mean")
PAPER = SparseVLM()
SQUARE = [((0, 0, 12, 12),)]

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


@pytest.mark.parametrize("method", [PAPER, SparseVLM(tau=0.9, theta=1), SparseVLM(tau=0.05)])
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
    facts = replace(
        tiny_spec("llava").facts,
        text=replace(tiny_spec("llava").facts.text, layers=32),
    )
    method = SparseVLM(schedule=schedule)
    assert method.sites(32) == (Site("layer", 3), Site("layer", 7), Site("layer", 16))
    exact = equivalent_tokens(method, facts, 576, 40, schedule).average
    assert abs(exact - average) < 0.05
    assert Budget("average", 1 - exact / 576).keep(method, facts, 576, 40) == schedule


def test_the_schedule_grows_with_the_share_and_never_rises():
    before = (0.0, 0.0, 0.0)
    for step in range(1, 101):
        now = PAPER.fractions(step / 100, 3)
        assert now[0] >= now[1] >= now[2] == pytest.approx(step / 100)
        assert all(a >= b for a, b in zip(now, before, strict=True))
        before = now
    assert before == (1, 1, 1)


@pytest.mark.parametrize(
    ("depth", "layers"),
    [(32, (3, 7, 16)), (28, (3, 6, 14)), (12, (1, 3, 6)), (6, (1, 2, 3)), (4, (1, 2, 3))],
)
def test_layers_keep_their_share_of_the_depth(depth: int, layers: tuple[int, ...]):
    assert tuple(site.layer for site in PAPER.sites(depth)) == layers


def test_a_prompt_without_words_behind_the_image_is_refused():
    view = make_view(PAPER, SQUARE)
    with pytest.raises(MethodError, match="words after the image"):
        PAPER.plan(replaced(view, text_positions=torch.arange(9)[None]), 12)


# ---------------------------------------------------------------- clustering


def slow_clusters(points: torch.Tensor, n: int) -> tuple[list[int], list[list[float]]]:
    """Centres and squared distances of (M, D) points, as the formulas read, with exp."""
    rows = points.double().tolist()
    squared = [
        [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x) for y in rows] for x in rows
    ]
    rho = [math.exp(-sum(sorted(row)[:n]) / n) for row in squared]
    largest = math.sqrt(max(map(max, squared)))
    scores = []
    for i, row in enumerate(squared):
        denser = [math.sqrt(row[j]) for j in range(len(row)) if (rho[j], -j) > (rho[i], -i)]
        scores.append(rho[i] * min(denser, default=largest))
    best = sorted(range(len(rows)), key=lambda i: (-scores[i], i))[:n]
    return sorted(best), squared


@pytest.mark.parametrize("n_centres", [1, 2, 5, 20])
def test_density_peaks_equal_the_slow_ones(n_centres: int):
    points = torch.randn(4, 20, 6, generator=torch.Generator().manual_seed(n_centres))
    squared = squared_distances(points)
    centres = density_peaks(squared, n_centres, n_centres)
    joined = nearest_centre(-squared, centres)
    for row in range(4):
        wanted, distances = slow_clusters(points[row], n_centres)
        assert torch.allclose(squared[row], torch.tensor(distances), atol=1e-5)
        assert centres[row].tolist() == wanted
        for i in range(20):
            nearest = min(range(n_centres), key=lambda c: distances[i][wanted[c]])
            assert joined[row, i] == (wanted.index(i) if i in wanted else nearest)


def test_each_of_three_heaps_has_one_centre():
    generator = torch.Generator().manual_seed(0)
    heap = torch.arange(30) % 3
    points = 3.0 * torch.eye(3).repeat(1, 4)[heap] + 0.1 * torch.randn(30, 12, generator=generator)
    squared = squared_distances(points[None])
    centres = density_peaks(squared, 3, 3)
    assert sorted(heap[centres[0]].tolist()) == [0, 1, 2]
    assert torch.equal(heap[centres[0]][nearest_centre(-squared, centres)[0]], heap)


def test_far_points_and_equal_points_have_centres_too():
    """Where exp underflows, and where everything is equal: the lower index, never an error."""
    far = 100.0 * torch.randn(1, 12, 4, generator=torch.Generator().manual_seed(0))
    assert len(density_peaks(squared_distances(far), 4, 4)[0].unique()) == 4
    same = torch.ones(1, 12, 4)
    assert density_peaks(squared_distances(same), 4, 4).tolist() == [[0, 1, 2, 3]]
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
    """What is kept, and what it becomes, token by token."""
    attention, raters = view.signals["text_attention"][row].double(), slow_raters(method, view, row)
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


@pytest.mark.parametrize("keep", [1, 2, 5, 20, 70, 143, 144])
@pytest.mark.parametrize("method", [PAPER, OFFICIAL, SparseVLM(tau=0)], ids=["p", "o", "tau0"])
def test_equals_the_slow_one(method: SparseVLM, keep: int):
    view = with_padding(make_view(method, SQUARE * 2, seed=keep))
    check_slow(method, view, slow_sparsevlm, (keep,), atol=1e-4)
    for row, weights in enumerate(method.weights(view)):
        raters = slow_raters(method, view, row)
        assert weights.nonzero().flatten().tolist() == raters
        assert 0 < len(raters) < 6


def test_words_that_are_all_alike_all_rate():
    view = make_view(OFFICIAL, SQUARE)
    view = replaced(view, text_embeddings=torch.ones(1, 9, 16))
    for method in (OFFICIAL, PAPER):
        assert torch.allclose(method.weights(view)[0], torch.tensor([0.0] * 3 + [1 / 6] * 6))


# ---------------------------------------------------------------- planted signals


def planted_recall(invert: bool) -> float:
    """Share of 12 tokens kept that the one relevant word looks at, among 24 of 144, while five words look elsewhere."""
    generator = torch.Generator().manual_seed(3)
    view = make_view(OFFICIAL, SQUARE * 16)
    planted = torch.rand(16, 144, generator=generator).argsort(dim=1)[:, :12]
    attention = torch.rand(16, 9, 144, generator=generator)
    rater = torch.rand(16, 144, generator=generator) * 0.1
    rater.scatter_(1, planted, 1.0)
    attention[:, 5] = 1 - rater if invert else rater
    embeddings = 0.1 * torch.randn(16, 9, 16, generator=generator)
    embeddings[:, 5] = 0.5
    view = replaced(
        view,
        text_attention=attention,
        text_embeddings=embeddings,
        all_projected=view.signals["all_projected"] + 1,
    )
    kept = OFFICIAL.plan(view, 24).kept
    return float((kept.unsqueeze(2) == planted.unsqueeze(1)).any(dim=1).float().mean())


def test_what_the_relevant_word_looks_at_is_kept():
    floor = 24 / 144
    assert planted_recall(invert=False) > 0.99
    assert planted_recall(invert=True) < floor


@pytest.mark.parametrize("above", [False, True])
def test_words_that_differ_by_rounding_alone_all_rate(above):
    """Equal words are as relevant as the mean, which sums of fp32 may miss by a little on either side."""
    torch.manual_seed(0)
    for n_words in range(2, 24):
        for n_tokens in (1, 3, 7, 50):
            embedded = torch.randn(1, n_tokens, 8)
            words = torch.randn(1, 1, 8).expand(1, n_words, 8)
            places, after = torch.arange(n_tokens)[None], torch.ones(1, n_words, dtype=torch.bool)
            found = rater_weights(embedded, places, words, after, above)
            torch.testing.assert_close(found, torch.full((1, n_words), 1 / n_words))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", [PAPER, OFFICIAL, DART()], ids=str)
@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "onevision_mixed"])
def test_methods_that_read_words_in_the_engine(name: str, method: TokenReducer):
    check_method(name, method)
