"""Selection time of every configured method over the similarity product X X^T of the same tokens.

The product is the smallest thing a similarity method must do, so the ratio shows how much a method
spends beyond the arithmetic that it cannot avoid, on any machine. Methods that build no similarity
matrix can stay below 1, and so can those that use its symmetry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter, process_time

import torch
from torch import Tensor

from espalier.harness.config.method_names import setting_names
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import TokenReducer
from lab.bench.bench_page import one_thread
from lab.bench.bench_setup import Figure, Setup, paired
from lab.bench.synthetic_views import features, view_of

PART = "selection"

#: Tokens and width of one image of the embedded model. Larger sizes: `lab.bench.selection_bench`.
SIZES = ((144, 192),)

#: One token in nine stays, the 64 of 576 that papers compare at.
KEEP_ONE_IN = 9

#: Short procedures are called so often that one timing takes about this long.
LONG_ENOUGH = 4e-3

#: Methods between two timings of the product.
GROUP = 4


def selection(setup: Setup) -> list[Figure]:
    """Time every entry of conf/method at each size, on one thread, against the product."""
    specs = [setup.spec(f"method={name}") for name in configured_methods()]
    with one_thread(), torch.inference_mode():
        return [figure for size in SIZES for figure in _at_size(setup, specs, *size)]


def configured_methods() -> list[str]:
    """Return the names of all settings: each variant of a method, and the former names."""
    return setting_names()


@dataclass(frozen=True)
class Question:
    """One configured method and its selection.

    Attributes:
        name: its file in conf/method.
        method: its name in the registry.
        keep: tokens that it keeps.
        ask: the timed procedure: the plan, and its merging. Returns the kept indices.
    """

    name: str
    method: str
    keep: int
    ask: Callable[[], Tensor]


def questions(specs: Sequence[tuple[str, RunSpec]], tokens: Tensor, keep: int) -> list[Question]:
    """Return what to ask of the methods that select: at their first site, on a view of these tokens."""
    return [
        question
        for name, spec in specs
        if (question := _question(name, spec, tokens, keep)) is not None
    ]


def _question(name: str, spec: RunSpec, tokens: Tensor, keep: int) -> Question | None:
    method = build_method(spec.method.name, spec.method.params)
    if not isinstance(method, TokenReducer) or not method.in_one_prefill:
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
    for question in questions(named, tokens, n // KEEP_ONE_IN):
        calls = max(1, round(LONG_ENOUGH / min(paired(question.ask, product, 2).first)))
        pair = paired(question.ask, product, repeats, calls)
        products += pair.second
        figures.append(pair.figure(PART, f"{question.name}, N={n} d={width} keep={question.keep}"))
    unit = Figure(PART, f"the product itself, N={n} d={width}", median(products) * 1e3, "ms")
    return [unit, *figures]


def product_of(tokens: Tensor) -> Callable[[], Tensor]:
    """Return what everything is compared with: the plain product of the tokens (1, N, D) with themselves."""

    def product() -> Tensor:
        return tokens[0] @ tokens[0].T

    return product


def in_rounds(
    selections: Sequence[Question],
    product: Callable[[], Tensor],
    repeats: int,
    clock: Callable[[], float] = process_time,
) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """Return for each question (seconds, the product's seconds) a round, and all times of the product.

    The product is timed before and after every few questions, which are compared with the mean of the two: what
    drifts, drifts for both. One untimed round comes first.
    """
    for question in selections:
        question.ask()
    times: dict[str, list[tuple[float, float]]] = {question.name: [] for question in selections}
    seconds_of(product, clock)
    products = [seconds_of(product, clock)]
    for turn in range(repeats):
        order = list(selections) if turn % 2 == 0 else list(reversed(selections))
        for group in (order[start : start + GROUP] for start in range(0, len(order), GROUP)):
            group_seconds = [seconds_of(question.ask, clock) for question in group]
            products.append(seconds_of(product, clock))
            for question, seconds in zip(group, group_seconds, strict=True):
                times[question.name].append((seconds, mean(products[-2:])))
    return times, products


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return what selections on a device are timed by, in seconds: processor time, on a GPU the wall clock at rest."""
    if device.type != "cuda":
        return process_time

    def at_rest() -> float:
        torch.cuda.synchronize(device)
        return perf_counter()

    return at_rest


def seconds_of(procedure: Callable[[], object], clock: Callable[[], float] = process_time) -> float:
    """Return the time of one call, from enough calls to be seen."""
    first = _timed(procedure, 1, clock)
    calls = round(LONG_ENOUGH / max(first, 1e-6))
    return first if calls <= 1 else _timed(procedure, calls, clock)


def _timed(procedure: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(calls):
        procedure()
    return (clock() - started) / calls
