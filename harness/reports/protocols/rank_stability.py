"""Whether methods keep their rank across seeds, samples, ratios, questions, benchmarks and models: Kendall's tau-b."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import cast

import numpy as np
import pandas as pd
from scipy import stats

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.comparison import ComparedRuns
from espalier.harness.reports.curves.figures import NOTE, Plot, Series, Spot, marker
from espalier.harness.reports.curves.stored_rows import RunScores
from espalier.harness.reports.frame import StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    Line,
    ProtocolTable,
    frame_of,
    grouped_runs,
    kept_text,
)
from espalier.harness.stats import Interval
from espalier.harness.stats.interval import Array
from espalier.harness.store.answer_digest import Key

Setting = Mapping[str, str | None]

#: What two rankings may differ in, in the order of the table.
DIMENSIONS = ("seed", "samples", "ratio", "question", "benchmark", "model")

#: Draws of sample weights, methods that a ranking needs, and quantiles of a 95 % interval.
DRAWS, FEWEST, ENDS = 200, 4, (0.025, 0.975)

WORDS = (
    "Kendall's tau-b between the orders of methods by score in two settings that differ in one thing, over the methods "
    "that both have (controls included, the unpruned model not): 1 is the same order, 0 none, -1 the reverse. Its "
    "interval is that of 200 Bayesian bootstrap draws over samples, the same weights in both where the samples are the "
    "same. `repeated` is the mean tau of a setting with its own draws: what chance in the samples alone leaves.",
    "A seed is that of the run: it decides what methods draw. A method with runs of one seed is taken to draw nothing "
    "and has the same scores at every seed. `samples` are two halves of the benchmark's, which share none.",
)


@dataclass(frozen=True)
class Ranking:
    """The scores of methods in one setting.

    Attributes:
        setting: values of `DIMENSIONS`, None where they are averaged or all together.
        keys: the samples.
        scores: by method, the score of each of `keys`.
    """

    setting: Setting
    keys: Sequence[Key]
    scores: Mapping[str, Array]

    def means(self, methods: Sequence[str], weights: Array) -> Array:
        """Return weighted mean scores (draws, methods), for weights (draws, samples)."""
        table = np.stack([self.scores[name] for name in methods], axis=1)
        return cast("Array", weights @ table / weights.sum(axis=1, keepdims=True))


def rank_stability(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return tau for each pair of settings that differ in one dimension, and its mean for each dimension.

    Raises:
        UserError: no two settings share enough methods.
    """
    rankings = [ranking for group in grouped_runs(results) for ranking in _rankings(group)]
    lines: list[Line] = []
    for dimension in DIMENSIONS:
        pairs = [
            (first, second, methods)
            for first, second in combinations(rankings, 2)
            if _differ_in(first, second) == [dimension]
            and len(methods := sorted(first.scores.keys() & second.scores.keys())) >= FEWEST
        ]
        drawn = [_draws(*pair) for pair in pairs]
        lines += [
            {
                "dimension": dimension,
                "first": first.setting[dimension],
                "second": second.setting[dimension],
                "in": ", ".join(
                    value
                    for name, value in first.setting.items()
                    if name not in (dimension, "rule") and value is not None
                ),
                "methods": len(methods),
                "tau": _interval(tau, taus),
                "repeated": repeated,
            }
            for (first, second, methods), (tau, taus, repeated) in zip(pairs, drawn, strict=True)
        ]
        if len(pairs) > 1:
            taus, draws, repeats = zip(*drawn, strict=True)
            lines.append(
                {
                    "dimension": dimension,
                    "first": "mean",
                    "second": f"of {len(pairs)} pairs",
                    "in": "",
                    "methods": None,
                    "tau": _interval(fmean(taus), np.mean(draws, axis=0)),
                    "repeated": fmean(repeats),
                }
            )
    if not lines:
        raise UserError(
            f"--protocol=ranks needs {FEWEST} methods in two settings that differ in one of {', '.join(DIMENSIONS)}; "
            "valid: a sweep such as `-m method=random,uniform,fastv,divprune ratio=0.75,0.9`"
        )
    frame = frame_of(lines)
    return ProtocolTable("ranks", "Do ranks hold?", WORDS, frame, [_plot(frame)], percent=False)


def _rankings(group: ComparedRuns) -> Iterator[Ranking]:
    """Yield the ranking of each amount: of all runs, of each half, of each seed, and of each kind of question."""
    shared = {
        "model": group.row["model"],
        "benchmark": group.row["benchmark"],
        "rule": group.row["budget_rule"],
        **dict.fromkeys(("seed", "samples", "question")),
    }
    for amount in dict.fromkeys(point[1:] for point in group.points):
        points = {point[0]: runs for point, runs in group.points.items() if point[1:] == amount}
        setting = {**shared, "ratio": kept_text(("", *amount))}
        scores = {name: group.scores(runs) for name, runs in points.items()}
        yield Ranking(setting, group.keys, scores)
        # A sample is in the same half in every setting.
        second = np.array([_checksum(key) % 2 == 1 for key in group.keys])
        for half, chosen in (("one half", ~second), ("the other", second)):
            if chosen.sum() > 1:
                keys = [key for key, inside in zip(group.keys, chosen, strict=True) if inside]
                parts = {name: values[chosen] for name, values in scores.items()}
                yield Ranking({**setting, "samples": half}, keys, parts)
        yield from _by_seed(group, setting, points)
        yield from _by_question(group.metric, setting, points)


def _by_seed(
    group: ComparedRuns, setting: Setting, points: Mapping[str, Sequence[RunScores]]
) -> Iterator[Ranking]:
    """Yield the ranking of each seed, if any method has several."""
    seeds = {name: {str(run.row["seed"]): run for run in runs} for name, runs in points.items()}
    values = sorted({seed for runs in seeds.values() if len(runs) > 1 for seed in runs})
    for value in values:
        scores = {
            name: group.scores([runs[value] if len(runs) > 1 else next(iter(runs.values()))])
            for name, runs in seeds.items()
            if len(runs) == 1 or value in runs
        }
        yield Ranking({**setting, "seed": value}, group.keys, scores)


def _by_question(
    metric: str, setting: Setting, points: Mapping[str, Sequence[RunScores]]
) -> Iterator[Ranking]:
    """Yield the ranking of each kind of question: the metrics `<headline>_<kind>` that only some samples have."""
    scorings = {name: runs[0].result.scorings() for name, runs in points.items()}
    first = next(iter(scorings.values()))
    metrics = {name for scoring in first.values() for name in scoring.scores}
    kinds = sorted(name for name in metrics if name.startswith(f"{metric}_"))
    for kind in kinds:
        keys = sorted(key for key, scoring in first.items() if kind in scoring.scores)
        # Kinds of kinds are left out: `accuracy_attr` and not `accuracy_attr_digit`.
        is_top = not any(kind.startswith(f"{parent}_") for parent in kinds)
        if is_top and 1 < len(keys) < len(first):
            scores = {
                name: np.array([scoring[key].scores[kind] for key in keys])
                for name, scoring in scorings.items()
            }
            yield Ranking({**setting, "question": kind.removeprefix(f"{metric}_")}, keys, scores)


def _differ_in(first: Ranking, second: Ranking) -> list[str]:
    """Return in what two settings differ; a seed, half or kind is not compared with all of them.

    Seeds and halves are compared with each other alone.
    """
    differing = [
        name if None not in (value, second.setting[name]) else "whole"
        for name, value in first.setting.items()
        if value != second.setting[name]
    ]
    parts = [name for name in ("seed", "samples") if first.setting[name] is not None]
    return differing if set(parts) <= set(differing) else [*differing, "whole"]


def _checksum(key: Key) -> int:
    task, number = key
    return zlib.crc32(f"{task}/{number}".encode())


def _tau(first: Array, second: Array) -> float:
    # Undefined where all methods are equal: such a ranking orders nothing.
    tau = float(stats.kendalltau(first, second).statistic)
    return 0.0 if np.isnan(tau) else tau


def _draws(first: Ranking, second: Ranking, methods: Sequence[str]) -> tuple[float, Array, float]:
    """Return tau, tau of each draw, and the mean tau of the settings with their own draws."""
    observed, drawn = [], []
    for ranking in (first, second):
        # Exponential weights; a sample has the same ones in every setting.
        generators = [np.random.default_rng(_checksum(key)) for key in ranking.keys]
        weights = [generator.standard_exponential(DRAWS) for generator in generators]
        observed.append(ranking.means(methods, np.ones((1, len(ranking.keys))))[0])
        drawn.append(ranking.means(methods, np.stack(weights, axis=1)))
    taus = np.array([_tau(*draws) for draws in zip(*drawn, strict=True)])
    repeated = fmean(
        _tau(means, draw) for means, draws in zip(observed, drawn, strict=True) for draw in draws
    )
    return _tau(observed[0], observed[1]), taus, repeated


def _interval(tau: float, taus: Array) -> Interval:
    # Draws add chance to that of the samples, and so lie lower: the estimate may be above all of them.
    low, high = np.quantile(taus, ENDS)
    return Interval(tau, min(float(low), tau), max(float(high), tau))


def _plot(lines: pd.DataFrame) -> Plot:
    names = lines["dimension"] + ": " + lines["first"] + " " + lines["second"]
    taus = [Spot(row, tau.value, tau.low, tau.high) for row, tau in lines["tau"].items()]
    repeated = [Spot(row, tau) for row, tau in lines["repeated"].items()]
    series = [
        Series("tau between two settings", taus, marker("o", zorder=4), key=True),
        Series("a setting with its own draws", repeated, marker("|", color=NOTE), key=True),
    ]
    heads = frozenset(lines.index[lines["first"] == "mean"])
    ticks: dict[float, str] = dict(enumerate(names))
    return Plot("dots", "Kendall's tau", series, ticks=ticks, heads=heads)
