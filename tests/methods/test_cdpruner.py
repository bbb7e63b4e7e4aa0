"""CDPruner and the determinantal point process under it, against determinants and against the engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import MethodError, View
from espalier.methods.cdpruner import CDPruner, relevance_of, rescaled
from espalier.methods.select.cosines import Held
from espalier.methods.select.dpp import dpp_map
from espalier.methods.select.similarity import cosine
from tests.methods.cases import make_view
from tests.methods.twins import check_method

SQUARE = [((0, 0, 6, 8),)]


def random_kernel(n_rows: int, n: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    similarity = cosine(torch.randn(n_rows, n, width, generator=generator))
    return similarity, torch.rand(n_rows, n, generator=generator) + 0.05


def slow_map(similarity: Tensor, quality: Tensor, n_keep: int) -> list[int]:
    """Greedy by determinants of the kernel's own submatrices, in fp64; the most qualified once all would be 0."""
    kernel = (quality.unsqueeze(1) * similarity * quality.unsqueeze(0)).double()
    kept: list[int] = []
    while len(kept) < n_keep:
        rest = [i for i in range(len(quality)) if i not in kept]
        new = {i: float(torch.linalg.det(kernel[[*kept, i]][:, [*kept, i]])) for i in rest}
        old = float(torch.linalg.det(kernel[kept][:, kept])) if kept else 1.0
        share = {i: new[i] / old / float(quality[i]) ** 2 for i in rest}
        live = [i for i in rest if share[i] > 1e-5]
        if not live:
            return sorted(kept + sorted(rest, key=lambda i: (-float(quality[i]), i)))[:n_keep]
        kept.append(max(live, key=lambda i: (new[i], -i)))
    return sorted(kept)


def picks(similarity: Held, quality: torch.Tensor, n_keep: int) -> torch.Tensor:
    return dpp_map(similarity, quality, n_keep).kept


@pytest.mark.parametrize("n_keep", [1, 2, 5, 9, 15])
@pytest.mark.parametrize("seed", range(4))
def test_the_picks_maximise_the_determinant_step_by_step(n_keep: int, seed: int):
    similarity, quality = random_kernel(3, 15, 24, seed)
    indices = picks(Held(similarity), quality, n_keep)
    wanted = [slow_map(s, q, n_keep) for s, q in zip(similarity, quality, strict=True)]
    assert indices.tolist() == wanted
    alone = [picks(Held(similarity[i : i + 1]), quality[i : i + 1], n_keep)[0] for i in range(3)]
    assert torch.equal(torch.stack(alone), indices)


def test_a_small_case_by_hand():
    """Vectors at 0, 10 and 90 degrees: 1 is best alone; beside it 2 leaves sin^2 80 = 0.97, and 0 only sin^2 10."""
    angle = torch.tensor([0.0, 10.0, 90.0]).deg2rad()
    similarity = (angle[:, None] - angle).cos()[None]
    quality = torch.tensor([[0.9, 1.0, 0.5]])
    assert picks(Held(similarity), quality, 1).tolist() == [[1]]
    assert picks(Held(similarity), quality, 2).tolist() == [[1, 2]]  # 0.25 * 0.97 > 0.81 * 0.03
    assert picks(Held(similarity), torch.tensor([[0.9, 1.0, 0.1]]), 2).tolist() == [[0, 1]]


def test_beyond_the_rank_the_best_of_the_rest_fill_the_count():
    similarity, quality = random_kernel(6, 40, 8, 0)
    indices = picks(Held(similarity), quality, 24)
    assert all(len(set(row)) == 24 for row in indices.tolist())
    assert dpp_map(Held(similarity), quality, 24).spare.tolist() == [16] * 6
    assert dpp_map(Held(similarity), quality, 8).spare.tolist() == [0] * 6
    for row in range(6):
        spanning = set(picks(Held(similarity), quality, 8)[row].tolist())
        rest = [i for i in quality[row].argsort(descending=True).tolist() if i not in spanning]
        assert set(indices[row].tolist()) == spanning | set(rest[:16])


def test_rows_may_run_out_of_rank_at_different_steps():
    similarity, quality = random_kernel(2, 20, 12, 3)
    mixed = torch.stack([similarity[0], torch.ones_like(similarity)[1]])
    indices = picks(Held(mixed), quality, 7)
    assert torch.equal(indices[0], picks(Held(similarity[:1]), quality[:1], 7)[0])
    assert dpp_map(Held(mixed), quality, 7).spare.tolist() == [0, 6]
    assert torch.equal(indices[1], quality[1].topk(7).indices.sort().values)


def test_a_tiny_quality_does_not_hide_what_is_new():
    """Squared, 1e-5 would drown in the rounding of a Cholesky factor of the kernel itself."""
    similarity = torch.eye(4)[None].clone()
    similarity[0, 0, 1] = similarity[0, 1, 0] = 1  # 0 and 1 are the same token
    quality = torch.tensor([[1.0, 1.0, 1e-5, 2e-5]])
    assert picks(Held(similarity), quality, 3).tolist() == [[0, 2, 3]]


def test_a_kernel_that_is_not_finite_is_refused():
    similarity, quality = random_kernel(1, 5, 8, 0)
    similarity[0, 2, 2] = float("nan")
    with pytest.raises(MethodError, match="similarities: NaN or infinite among 5"):
        dpp_map(Held(similarity), quality, 2)


# ---------------------------------------------------------------- the method


def test_relevance_is_the_mean_cosine_with_the_words_that_are_there():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 7, 5, generator=generator)
    words = torch.randn(2, 4, 5, generator=generator)
    words[1, 2:] = 0
    for row, n_words in ((0, 4), (1, 2)):
        wanted = torch.stack(
            [
                torch.cosine_similarity(tokens[row], words[row, word : word + 1])
                for word in range(n_words)
            ]
        ).mean(0)
        assert torch.allclose(
            relevance_of(normalize(tokens, dim=-1), words)[row], wanted, atol=1e-6
        )


def test_equal_relevances_are_all_one():
    assert rescaled(torch.tensor([[0.4, 0.4, 0.4]])).tolist() == [[1, 1, 1]]


def slow_cdpruner(method: CDPruner, view: View, row: int, keep: int) -> list[int]:
    units = normalize(view.tokens[row].double(), dim=1)
    quality = torch.ones(len(units))
    if method.relevance != "none":
        words = normalize(view.signals["text_embeddings"][row].double(), dim=1)
        relevance = (units @ words.T).mean(1)
        low, high = relevance.min(), relevance.max()
        quality = (relevance - low + 1e-6) / (high - low)
    return slow_map((units @ units.T).fill_diagonal_(1), quality, keep)


test_cdpruner = check_method(
    "cdpruner",
    slow_cdpruner,
    settings=({}, {"relevance": "none"}),
    views=lambda method, _keep: make_view(method, SQUARE * 2),
    keeps=(9,),
)


def test_without_a_condition_the_words_are_not_read():
    """The first pick is a tie."""
    view = make_view(CDPruner(relevance="none"), SQUARE)
    assert not view.signals
    assert CDPruner(relevance="none").plan(view, 9).kept[0, 0] == 0
