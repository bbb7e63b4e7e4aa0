"""Selection time of every configured method over the similarity product X X^T of the same tokens.

The product is the smallest thing a similarity method must do, so the ratio says how much a method
spends beyond the arithmetic that it cannot avoid, on any machine. Methods that build no similarity
matrix can stay below 1, and so can those that use its symmetry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import process_time

import torch
from torch import Tensor

from harness.config.compose import CONF
from harness.config.spec import RunSpec
from harness.measure.bench_setup import Figure, Setup, paired
from harness.measure.bench_views import features, view_of
from methods.base import TokenReducer
from methods.registry import build_method

PART = "selection"

#: Tokens and width of one image of the embedded model. Larger sizes: `harness.measure.bench_select`.
SIZES = ((144, 192),)

#: One token in nine stays, the 64 of 576 that papers compare at.
KEEP_ONE_IN = 9

#: Short procedures are called so often that one timing takes about this long.
LONG_ENOUGH = 4e-3


def selection(setup: Setup) -> list[Figure]:
    """Time every entry of conf/method at each size, on one thread, against the product."""
    specs = [setup.spec(f"method={name}") for name in configured_methods()]
    with one_thread(), torch.inference_mode():
        return [figure for size in SIZES for figure in _at_size(setup, specs, *size)]


def configured_methods() -> list[str]:
    """Return the names that `method=` takes."""
    return sorted(path.stem for path in (CONF / "method").glob("*.yaml"))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Question:
    """One configured method and the selection that is asked of it.

    Attributes:
        name: its file in conf/method.
        method: its name in the registry.
        keep: tokens that it keeps.
        ask: the timed procedure: the plan, and the merging that it asks for. Returns the kept indices.
    """

    name: str
    method: str
    keep: int
    ask: Callable[[], Tensor]

    def seconds(self) -> float:
        """Return the processor time of one call, from enough calls to be seen."""
        first = _timed(self.ask, 1)
        calls = round(LONG_ENOUGH / max(first, 1e-6))
        return first if calls <= 1 else _timed(self.ask, calls)


def questions(specs: Sequence[tuple[str, RunSpec]], tokens: Tensor, keep: int) -> list[Question]:
    """Return what to ask of the methods that select: at their first site, on a view of these tokens."""
    return [
        asked for name, spec in specs if (asked := _question(name, spec, tokens, keep)) is not None
    ]


def _question(name: str, spec: RunSpec, tokens: Tensor, keep: int) -> Question | None:
    method = build_method(spec.method.name, spec.method.params)
    if not isinstance(method, TokenReducer):
        return None
    facts = spec.model.facts
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    if not sites:
        return None
    # Methods that compare frames keep some of them whole, and can keep no fewer tokens.
    kept = tokens.shape[1] // 2 if method.needs_frames() else keep
    view = view_of(tokens, sites[0], method.needs(sites[0]), method.needs_frames())

    def ask() -> Tensor:
        plan = method.plan(view, kept)
        if plan.merge is not None:
            plan.merge.apply(view.tokens, plan.kept.shape[1])
        return plan.kept

    return Question(name, spec.method.name, kept, ask)


def _at_size(setup: Setup, specs: Sequence[RunSpec], n: int, width: int) -> list[Figure]:
    tokens = features(n, width)
    repeats = setup.repeats(21, 5)
    product = product_of(tokens)
    figures: list[Figure] = []
    products: list[float] = []
    named = list(zip(configured_methods(), specs, strict=True))
    for asked in questions(named, tokens, n // KEEP_ONE_IN):
        calls = max(1, round(LONG_ENOUGH / min(paired(asked.ask, product, 2).first)))
        pair = paired(asked.ask, product, repeats, calls)
        products += pair.second
        figures.append(pair.figure(PART, f"{asked.name}, N={n} d={width} keep={asked.keep}"))
    unit = Figure(PART, f"the product itself, N={n} d={width}", median(products) * 1e3, "ms")
    return [unit, *figures]


def product_of(tokens: Tensor) -> Callable[[], Tensor]:
    """Return what everything is compared with: the plain product of the tokens (1, N, D) with themselves."""

    def product() -> Tensor:
        return tokens[0] @ tokens[0].T

    return product


def _timed(procedure: Callable[[], object], calls: int) -> float:
    started = process_time()
    for _ in range(calls):
        procedure()
    return (process_time() - started) / calls
