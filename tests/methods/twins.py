"""A method beside its twins: a slow version of its paper, and what its released code made of the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.harness.specs.catalogue import build_method
from espalier.methods.base import Decoder, Plan, Site, TokenReducer, View
from espalier.methods.compressor import CacheCompressor
from tests.methods.cases import BLOCKS, DEPTH, Tiling, make_view
from tests.methods.released import numbers, released_view, shares, vectors

Slow = Callable[..., Any]
#: Of a method and a count, and maybe a value, a view.
ViewOf = Callable[..., Any]
#: Of the number of tokens of a view, how many of them are kept, one count after the other.
Counts = Callable[[int], Sequence[int]]

#: Methods that the imported test files declare, each with its keys in released.json.
DECLARED: dict[str, set[str]] = {}


def outcome(view: View, plan: Plan) -> Tensor:
    """Return the tokens (B, K, D) that go on."""
    if plan.merge is None:
        return view.tokens.gather(1, plan.kept[..., None].expand(-1, -1, view.tokens.shape[2]))
    return plan.merge.apply(view.tokens, plan.kept.shape[1])


def best(scores: Sequence[float], keep: int) -> list[int]:
    """Return the places of the highest scores in order, the lower of equal ones."""
    return sorted(sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:keep])


def slow_highest(
    signal: str | Callable[[Any], str], method: Any, view: View, row: int, keep: int
) -> dict[int, Tensor]:
    """Return the highest of the one signal that a method reads; it merges nothing.

    Args:
        signal: its key, or of a method its key.
    """
    ((key, scores),) = view.signals.items()
    assert key == (signal if isinstance(signal, str) else signal(method))
    return {token: view.tokens[row, token] for token in best(scores[row].tolist(), keep)}


def seeded(tilings: Sequence[Tiling] | None = None) -> ViewOf:
    """Return what makes another random view for every count."""
    return lambda method, keep: make_view(method, tilings, seed=keep)


def at_stage(method: Any, _keep: int, stage: int) -> View:
    """Return a random view of a site by its number among all sites."""
    return make_view(method, site=method.all_sites(BLOCKS, DEPTH)[stage])


def usual(n_tokens: int) -> tuple[int, ...]:
    """Return counts from one token to all."""
    return (1, 3, 5, 11, n_tokens // 2, n_tokens - 1, n_tokens)


def check_method(
    name: str,
    slow: Slow,
    settings: Sequence[Mapping[str, Any]] = ({},),
    views: ViewOf = lambda method, _keep: make_view(method),
    varied: Iterable[Any] = (),
    keeps: Sequence[int] | Counts = usual,
    within: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {"": nullcontext},
    atol: float = 1e-5,
    released: Callable[[dict[str, Any]], View | None] | None = None,
    sources: Sequence[str] = (),
    sums_atol: float = 2e-4,
) -> Callable[[Callable[[], None]], None]:
    """Return the test of a method against a slow version of its paper and vectors of its released code.

    Args:
        name: of the method in the catalogue.
        slow: what `check_slow` holds the method against.
        settings: hyper-parameters of each instance.
        views: of a method and a count, a view.
        varied: values that `views` gets one after the other as its last argument; empty: it gets none.
        keeps: counts, each in a case of its own, or a function from the number of tokens to counts.
        within: what cases run in, by name.
        atol: of merged tokens, or of scores.
        released: of a case of released.json, the view that the method has with the case's `params`; None if the
            function has checked the case itself.
        sources: keys of released.json, by default the method's name.
        sums_atol: of the sums of tokens that released code merged.
    """
    keys = sources or (name,) * (released is not None)
    DECLARED.setdefault(name, set()).update(keys)

    def run_slow(params: Mapping[str, Any], place: str, value: tuple, count: tuple) -> None:
        method, view_of = build_method(name, params), lambda *args: views(*args, *value)
        with within[place]():
            check_slow(method, view_of, slow, count or keeps, atol)

    def run_released(case: dict[str, Any]) -> None:
        view = released(case)
        if view is not None:
            check_released(build_method(name, case.get("params", {})), view, case, sums_atol)

    points = product(
        settings,
        within,
        [(value,) for value in varied] or [()],
        [()] if callable(keeps) else [(keep,) for keep in keeps],
    )
    cases = [pytest.param(partial(run_slow, *point), id=_id_of(*point)) for point in points]
    cases += [
        pytest.param(partial(run_released, case), id=f"released-{case['seed']}")
        for key in keys
        for case in vectors(key)
    ]

    @pytest.mark.parametrize("check", cases)
    def test(check: Callable[[], None]) -> None:
        check()

    return test


def _id_of(params: Mapping[str, Any], place: str, value: tuple, count: tuple) -> str:
    parts = ("slow", *(f"{key}={param}" for key, param in params.items()), place, *value, *count)
    return "-".join(str(part) for part in parts if part != "")


def check_slow(
    method: Any, view_of: ViewOf, slow: Slow, keeps: Sequence[int] | Counts, atol: float
) -> None:
    """Hold each row of what a method chooses against a slow version; the scores of a cache compressor as a whole.

    Args:
        slow: of a method, a view, a row and a count, the tokens that a reducer keeps, or what each of them becomes, or
            the ascending choice of a decoder; of a compressor and a view, the scores.
    """
    view = view_of(method, 0)
    if isinstance(method, CacheCompressor):
        torch.testing.assert_close(method.score(view), slow(method, view), atol=atol, rtol=0)
        return
    for keep in keeps(view.tokens.shape[1]) if callable(keeps) else keeps:
        view = view_of(method, keep)
        if isinstance(method, Decoder):
            kept, ordered = method.choose(view, keep), list
        else:
            plan = method.answer(view, keep)
            kept, values, ordered = plan.kept, outcome(view, plan), sorted
        for row, choice in enumerate(kept.tolist()):
            expected = slow(method, view, row, keep)
            assert choice == ordered(expected), (keep, row)
            if isinstance(expected, Mapping):
                wanted = torch.stack([expected[token] for token in sorted(expected)])
                torch.testing.assert_close(values[row].double(), wanted.double(), atol=atol, rtol=0)


def check_kept(view: View, *cases: tuple[TokenReducer, int, Sequence[int]]) -> None:
    """Hold what methods keep of the one row of a view against what was worked out by hand: (method, keep, kept)."""
    for method, keep, kept in cases:
        assert method.plan(view, keep).kept.tolist() == [list(kept)], (method, keep)


def attended_case(case: Mapping[str, Any], site: Site) -> View:
    """Return a row of tokens of a case, with the class token's attention."""
    seed, n_tokens = case["seed"], case["tokens"]
    attention = shares(seed + 100, 1, n_tokens)
    return released_view(site, numbers(seed, 1, n_tokens, 8), n_tokens, cls_attention=attention)


def check_released(
    method: TokenReducer, view: View, case: Mapping[str, Any], atol: float = 2e-4
) -> None:
    """Hold a plan of a view against the tokens that released code kept, and the sums of what it merged."""
    assert "kept" in case or "sums" in case
    plan = method.plan(view, case.get("keep", view.tokens.shape[1] - 1))
    if "kept" in case:
        assert plan.kept[0].tolist() == case["kept"]
    if "sums" in case:
        sums = outcome(view, plan)[0].double().sum(dim=1)
        torch.testing.assert_close(sums, torch.tensor(case["sums"]).double(), atol=atol, rtol=0)
