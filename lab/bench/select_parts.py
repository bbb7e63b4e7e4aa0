"""The two parts of the selection benchmark: ratios to the product at the usual sizes, and growth to long videos."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import log
from statistics import mean, median, quantiles
from time import process_time

import torch
from torch import Tensor

from espalier.harness.cost.memory import free_memory, peak_memory, resident_peak
from espalier.methods.select.cosines import memory_limit
from lab.bench.bench_setup import Setup
from lab.bench.selection_times import (
    Question,
    configured_methods,
    in_rounds,
    product_of,
    questions,
    seconds_of,
)
from lab.bench.synthetic_views import features

MIB = 2**20

#: Tokens, width, rounds.
RATIOS = ((576, 4096, 15), (2880, 4096, 5))
RATIO_KEEP = 9
GROWTH = (2880, 25088)
GROWTH_WIDTH = 1024
GROWTH_KEEP = 10

#: Nothing is started at the large size that would take longer by the square of the tokens, in seconds, or more than
#: this share of the free memory.
LONGEST, LARGEST = 60.0, 0.5
#: By config or by method: what a ratio may be at 2,880 tokens and more, and a growth exponent.
PRODUCTS = ("divprune", "d2pruner", "tome")
DETERMINANTS = ("cdpruner",)
THIN = ("visionzip",)
SCORES = (
    "d2pruner_di", "dart", "fastervlm", "fastv", "fitprune", "globalcom2", "hired", "pyramiddrop",
    "random", "specvlm", "uniform", "uvprune",
)  # fmt: skip
#: Configs that are measured with an N x N matrix and without one.
BOTH_WAYS = ("divprune", "d2pruner", "d2pruner_localization")
#: Peak memory on top of what was there, without a matrix.
PEAK_MIB = 300.0


@dataclass(frozen=True)
class SelectionRow:
    """One line of the table.

    Attributes:
        name: the config.
        n: visual tokens.
        width: their width.
        keep: how many stay.
        way: `held` or `computed`, where a method may hold the matrix of cosines or not; else empty.
        ms: median processor time.
        ratio: median of time over the product's.
        quartiles: of the ratio, where there are several rounds.
        at_most: the target of the ratio.
        growth: exponent of time in N, from the smaller size of the part.
        growth_at_most: its target.
        peak_mib: peak resident memory over that before.
        peak_at_most: its target.
    """

    name: str
    n: int
    width: int
    keep: int
    way: str
    ms: float
    ratio: float
    quartiles: tuple[float, float] | None = None
    at_most: float | None = None
    growth: float | None = None
    growth_at_most: float | None = None
    peak_mib: float | None = None
    peak_at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether all targets are met; None without one."""
        pairs = (
            (self.ratio, self.at_most),
            (self.growth, self.growth_at_most),
            (self.peak_mib, self.peak_at_most),
        )
        verdicts = [
            value <= limit for value, limit in pairs if value is not None and limit is not None
        ]
        return all(verdicts) if verdicts else None


def ratio_target(question: Question, n: int, way: str = "") -> float | None:
    """Return what the ratio may be for this method at this size, or None."""
    if question.name in SCORES or question.method in SCORES:
        return 0.1 if n >= 2880 else None
    if question.method in THIN:
        return 0.2 if n >= 2880 else None
    if question.method in DETERMINANTS:
        return 1.5 if n == 2880 else None
    if question.method in PRODUCTS:
        large = 2.5 if way == "computed" else 1.5
        return 1.3 if n <= 2880 else large
    return None


def growth_target(question: Question) -> float | None:
    """Return what the growth exponent may be, or None."""
    if question.name in SCORES or question.method in SCORES:
        return 1.3
    return 2.15 if question.method in PRODUCTS else None


def ratios(setup: Setup, names: Sequence[str] = ()) -> list[SelectionRow]:
    """Time configs, all without names, at the usual sizes, round after round."""
    specs = [(name, setup.spec(f"method={name}")) for name in names or configured_methods()]
    rows: list[SelectionRow] = []
    for n, width, repeats in RATIOS:
        tokens = features(n, width)
        selections = questions(specs, tokens, n // RATIO_KEEP)
        times, products = in_rounds(selections, product_of(tokens), setup.repeats(repeats, 2))
        rows.append(SelectionRow("X X^T", n, width, n, "", median(products) * 1e3, 1.0))
        rows += [
            ratio_row(question, n, width, times[question.name], ratio_target(question, n))
            for question in selections
        ]
    return rows


def ratio_row(
    question: Question,
    n: int,
    width: int,
    pairs: Sequence[tuple[float, float]],
    target: float | None = None,
) -> SelectionRow:
    """Return the row of one question out of its rounds, (seconds, the product's seconds) each."""
    shares = [seconds / product for seconds, product in pairs]
    low, _, high = quantiles(shares, n=4, method="inclusive")
    ms = median(seconds for seconds, _ in pairs) * 1e3
    return SelectionRow(
        question.name, n, width, question.keep, "", ms, median(shares), (low, high), target
    )


@dataclass(frozen=True)
class Alone:
    """One call by itself: processor time, peak memory over what was there, and what was kept."""

    seconds: float
    peak: int
    kept: Tensor


def growth(setup: Setup, names: Sequence[str] = ()) -> tuple[list[SelectionRow], list[str]]:
    """Time one config of each method at both sizes; return also, in words, what was compared and what left out.

    Without names, of all methods.
    """
    small, large = GROWTH
    specs = [(name, setup.spec(f"method={name}")) for name in names or configured_methods()]
    chosen = [(name, s) for name, s in specs if name == s.method.name or name in BOTH_WAYS]
    short, long = (questions(chosen, features(n, GROWTH_WIDTH), n // GROWTH_KEEP) for n in GROWTH)
    product = product_of(features(large, GROWTH_WIDTH))
    products = [seconds_of(product), seconds_of(product)]
    rows: list[SelectionRow] = []
    notes: list[str] = []
    for small_question, large_question in zip(short, long, strict=True):
        before = [timed_alone(small_question, way, 5) for way in ways(small_question)]
        reason = too_large(before, (large / small) ** 2)
        if reason:
            notes.append(f"{small_question.name} was not measured at {large} tokens: {reason}.")
            continue
        after = [timed_alone(large_question, way, 1) for way in ways(large_question)]
        if sum(run.seconds for run in after) > products[-1] / 5:
            products.append(seconds_of(product))
        unit = mean(products[-2:])
        rows += [
            _grown(large_question, way, run, earlier, unit)
            for way, run, earlier in zip(ways(large_question), after, before, strict=True)
        ]
        if len(after) > 1:
            equal = torch.equal(after[0].kept, after[1].kept)
            verdict = "the same tokens" if equal else "DIFFERENT tokens"
            notes.append(
                f"{small_question.name} at {large} tokens keeps {verdict} with the matrix held and without."
            )
    unit = median(products)
    return [SelectionRow("X X^T", large, GROWTH_WIDTH, large, "", unit * 1e3, 1.0), *rows], notes


def ways(question: Question) -> tuple[str, ...]:
    """Return how a config is measured: with the matrix and without, or as it comes."""
    return ("held", "computed") if question.name in BOTH_WAYS else ("",)


def timed_alone(question: Question, way: str, repeats: int) -> Alone:
    """Time a method by itself and watch the resident set of the process."""
    limits = {"held": 2**62, "computed": 0}
    with memory_limit(limits[way]) if way else nullcontext():
        with peak_memory() as peak:
            resident, started = resident_peak(), process_time()
            kept = question.ask()
            times = [process_time() - started]
        times += [seconds_of(question.ask) for _ in range(repeats - 1)]
    return Alone(median(times), peak.bytes - resident, kept)


def too_large(runs: Sequence[Alone], factor: float) -> str:
    """Return why a method is not started at the large size, judging by the small one; empty if it is."""
    seconds = factor * sum(run.seconds for run in runs)
    n_bytes = factor * max(run.peak for run in runs)
    if seconds > LONGEST:
        return f"by the square of the tokens it would take {seconds:.0f} s"
    if n_bytes > LARGEST * free_memory():
        return f"by the square of the tokens it would take {n_bytes / 2**30:.0f} GiB"
    return ""


def _grown(question: Question, way: str, run: Alone, before: Alone, unit: float) -> SelectionRow:
    small, large = GROWTH
    return SelectionRow(
        question.name,
        large,
        GROWTH_WIDTH,
        question.keep,
        way,
        run.seconds * 1e3,
        run.seconds / unit,
        at_most=ratio_target(question, large, way),
        growth=log(run.seconds / before.seconds) / log(large / small),
        growth_at_most=growth_target(question),
        peak_mib=run.peak / MIB,
        peak_at_most=PEAK_MIB if way == "computed" else None,
    )
