"""AIM against a slow version, by hand, and against what its released code makes of tokens and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.harness.engine.signals.decoder_attention import page_rank
from espalier.methods.aim import AIM
from espalier.methods.base import View
from tests.methods.cases import PREFIX, make_view
from tests.methods.crop_views import crops_with_shares
from tests.methods.released import numbers, released_view
from tests.methods.twins import check_method, outcome


def slow_merge(tokens: Tensor, keep: int) -> dict[int, Tensor]:
    """Return what is left of one picture by place, merged in rounds of pairs over lists."""
    left = dict(enumerate(tokens.double()))
    while len(left) > keep:
        places = list(left)
        even, odd = places[::2], places[1::2]

        def like(a: int, b: int, left: dict[int, Tensor] = left) -> float:
            return float(torch.cosine_similarity(left[a], left[b], dim=0))

        partner = {a: max(odd, key=lambda b, a=a: (like(a, b), -b)) for a in even}
        n_pairs = min(len(left) - keep, len(left) // 2)
        leaving = sorted(even, key=lambda a: (-like(a, partner[a]), a))[:n_pairs]
        left = {
            place: torch.stack([left[place], *(left[a] for a in leaving if partner[a] == place)])
            for place in places
            if place not in leaving
        }
        left = {place: group.mean(dim=0) for place, group in left.items()}
    return left


def slow_aim(_method: AIM, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """Picture by picture."""
    return {
        picture[place]: token
        for picture, share in crops_with_shares(view, row, keep)
        if share
        for place, token in slow_merge(view.tokens[row, picture], share).items()
    }


def test_two_rounds_by_hand():
    """Tokens 0 and 2 go into 1, a third each; then 1 goes into 3, half each."""
    tokens = torch.tensor([[[3.0, 0], [3, 0], [6, 0], [0, 8]]])
    view = released_view(PREFIX, tokens, 4)
    once, twice = AIM().plan(view, 2), AIM().plan(view, 1)
    assert (once.kept.tolist(), twice.kept.tolist()) == ([[1, 3]], [[3]])
    torch.testing.assert_close(outcome(view, once), torch.tensor([[[4.0, 0], [0, 8]]]))
    torch.testing.assert_close(outcome(view, twice), torch.tensor([[[2.0, 4]]]))


def released_aim(case: dict[str, Any]) -> View:
    """Hold its ranks, too."""
    seed, n_tokens = case["seed"], case["tokens"]
    query, key = (numbers(seed + more, 1, 2, n_tokens // 2, 4) for more in (100, 200))
    valid = torch.ones(1, n_tokens // 2, dtype=torch.bool)
    rank = page_rank(query, key, 0.5, valid, block=7)[0]
    torch.testing.assert_close(rank, torch.tensor(case["importance"]), atol=2e-7, rtol=1e-4)
    return released_view(PREFIX, numbers(seed, 1, n_tokens, 8), n_tokens)


PICTURES = [((0, 0, 6, 8),), ((0, 0, 4, 6), (1, 0, 6, 4)), ((0, 0, 3, 4), (1, 0, 6, 6))]

test_aim = check_method(
    "aim",
    slow_aim,
    views=lambda method, _keep: make_view(method, PICTURES),
    keeps=(1, 2, 7, 12, 30, 47, 48),
    released=released_aim,
    sums_atol=2e-5,
)


def test_padding_has_no_rank_and_gives_none_away():
    query, key = numbers(1, 1, 4, 6, 4), numbers(2, 1, 2, 6, 4)
    alone = page_rank(query, key, 0.5, torch.ones(1, 6, dtype=torch.bool))
    padded = [torch.cat([torch.ones_like(x[:, :, :3]), x], dim=2) for x in (query, key)]
    valid = torch.tensor([[False] * 3 + [True] * 6])
    together = page_rank(padded[0], padded[1], 0.5, valid)
    assert together[0, :3].eq(0).all()
    torch.testing.assert_close(together[:, 3:], alone)
