"""A method beside its twins: a slow version of its paper, and what its released code made of the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.methods.base import Plan, Site, TokenReducer, View
from tests.methods.released import numbers, released_view, shares, vectors

#: Of a method, a view, a row and a count: the tokens that stay, or what each of them becomes.
Slow = Callable[[Any, View, int, int], Sequence[int] | Mapping[int, Tensor]]


def outcome(view: View, plan: Plan) -> Tensor:
    """Return the tokens (B, K, D) that go on."""
    if plan.merge is None:
        return view.tokens.gather(1, plan.kept[..., None].expand(-1, -1, view.tokens.shape[2]))
    return plan.merge.apply(view.tokens, plan.kept.shape[1])


def best(scores: Sequence[float], keep: int) -> list[int]:
    """Return the places of the highest scores in order, the lower of equal ones."""
    return sorted(sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:keep])


def check_slow(
    method: TokenReducer,
    view: View,
    slow: Slow,
    keeps: Sequence[int] | None = None,
    atol: float = 1e-5,
) -> None:
    """Hold each row of the plans of a view against a slow version, at counts from one token to all."""
    n_rows, n_tokens = view.tokens.shape[:2]
    usual = (1, 3, 5, 11, n_tokens // 2, n_tokens - 1, n_tokens)
    for keep in usual if keeps is None else keeps:
        plan = method.plan(view, keep)
        plan.check(n_tokens, plan.kept.shape[1])
        values = outcome(view, plan)
        for row in range(n_rows):
            expected = slow(method, view, row, keep)
            assert plan.kept[row].tolist() == sorted(expected), (keep, row)
            if isinstance(expected, Mapping):
                wanted = torch.stack([expected[token] for token in sorted(expected)])
                torch.testing.assert_close(values[row].double(), wanted.double(), atol=atol, rtol=0)


def check_kept(view: View, *cases: tuple[TokenReducer, int, Sequence[int]]) -> None:
    """Hold what methods keep of the one row of a view against what was worked out by hand: (method, keep, kept)."""
    for method, keep, kept in cases:
        assert method.plan(view, keep).kept.tolist() == [list(kept)], (method, keep)


def released(*names: str) -> pytest.MarkDecorator:
    """Parametrise a test by the cases of some released code."""
    cases = [case for name in names for case in vectors(name)]
    return pytest.mark.parametrize("case", cases, ids=[str(case["seed"]) for case in cases])


def attended_case(case: Mapping[str, Any], site: Site) -> View:
    """Return a row of tokens of a case, with the class token's attention."""
    seed, n_tokens = case["seed"], case["tokens"]
    attention = shares(seed + 100, 1, n_tokens)
    return released_view(site, numbers(seed, 1, n_tokens, 8), n_tokens, cls_attention=attention)


def check_released(
    method: TokenReducer, view: View, case: Mapping[str, Any], atol: float = 2e-4
) -> Plan:
    """Hold a plan of a view against the tokens that released code kept, and the sums of what it merged."""
    assert "kept" in case or "sums" in case
    plan = method.plan(view, case["keep"])
    if "kept" in case:
        assert plan.kept[0].tolist() == case["kept"]
    if "sums" in case:
        sums = outcome(view, plan)[0].double().sum(dim=1)
        torch.testing.assert_close(sums, torch.tensor(case["sums"]).double(), atol=atol, rtol=0)
    return plan
