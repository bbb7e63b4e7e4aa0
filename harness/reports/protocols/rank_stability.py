"""Whether methods keep their rank across seeds, samples, ratios, questions, benchmarks and models: Kendall's tau-b."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import Key
from espalier.harness.reports.curves.figures import Plot, Series, Spot, marker
from espalier.harness.reports.curves.plot_style import INK, NOTE
from espalier.harness.reports.curves.stored_rows import RunScores, StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    BenchmarkRuns,
    Cell,
    ProtocolTable,
    grouped_runs,
    kept_text,
)
from espalier.harness.stats import Interval

Array = NDArray[np.float64]

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

    setting: Mapping[str, str | None]
    keys: Sequence[Key]
    scores: Mapping[str, Array]

    def means(self, methods: Sequence[str], weights: Array) -> Array:
        """Return weighted mean scores (draws, methods), for weights (draws, samples)."""
        table = np.stack([self.scores[name] for name in methods], axis=1)
        means: Array = weights @ table / weights.sum(axis=1, keepdims=True)
        return means


def rank_stability(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return tau for each pair of settings that differ in one dimension, and its mean for each dimension.

    Raises:
        UserError: no two settings share enough methods.
    """
    rankings = [ranking for group in grouped_runs(results) for ranking in _rankings(group)]
    lines: list[Mapping[str, Cell]] = []
    for dimension in DIMENSIONS:
        pairs = [
            (first, second, methods)
            for first, second in combinations(rankings, 2)
            if _differ_in(first, second) == [dimension]
            and len(methods := sorted(first.scores.keys() & second.scores.keys())) >= FEWEST
        ]
        drawn = [_draws(*pair) for pair in pairs]
        lines += [_line(dimension, pair, *taus) for pair, taus in zip(pairs, drawn, strict=True)]
        if len(pairs) > 1:
            lines.append(_mean_line(dimension, lines[-len(pairs) :], drawn))
    if not lines:
        raise UserError(
            f"--protocol=ranks needs {FEWEST} methods in two settings that differ in one of {', '.join(DIMENSIONS)}; "
            "valid: a sweep such as `-m method=random,uniform,fastv,divprune ratio=0.75,0.9`"
        )
    return ProtocolTable("ranks", "Do ranks hold?", WORDS, lines, [_plot(lines)], percent=False)


def _rankings(group: BenchmarkRuns) -> Iterator[Ranking]:
    """Yield the ranking of each amount: of all runs, of each half, of each seed, and of each kind of question."""
    shared: dict[str, str | None] = {
        "model": group.model,
        "benchmark": group.benchmark,
        "rule": group.rule,
    }
    for amount in dict.fromkeys(point[1:] for point in group.points):
        points = {point[0]: runs for point, runs in group.points.items() if point[1:] == amount}
        setting = {**shared, **dict.fromkeys(("seed", "samples", "question"))}
        setting["ratio"] = kept_text(("", *amount))
        scores = {name: group.scores(runs) for name, runs in points.items()}
        whole = Ranking(setting, group.compared.keys, scores)
        yield whole
        yield from _by_half(whole)
        yield from _by_seed(group, setting, points)
        yield from _by_question(group, setting, points)


def _by_half(whole: Ranking) -> Iterator[Ranking]:
    """Yield the rankings of two halves of the samples; a sample is in the same one in every setting."""
    second = np.array([_checksum(key) % 2 == 1 for key in whole.keys])
    for half, chosen in (("one half", ~second), ("the other", second)):
        if chosen.sum() > 1:
            keys = [key for key, inside in zip(whole.keys, chosen, strict=True) if inside]
            scores = {name: values[chosen] for name, values in whole.scores.items()}
            yield Ranking({**whole.setting, "samples": half}, keys, scores)


def _by_seed(
    group: BenchmarkRuns,
    setting: Mapping[str, str | None],
    points: Mapping[str, Sequence[RunScores]],
) -> Iterator[Ranking]:
    """Yield the ranking of each seed, if any method has several."""
    seeds = {
        name: {str(group.result(run).row["seed"]): run for run in runs}
        for name, runs in points.items()
    }
    values = sorted({seed for runs in seeds.values() if len(runs) > 1 for seed in runs})
    for value in values:
        scores = {
            name: group.scores([runs[value] if len(runs) > 1 else next(iter(runs.values()))])
            for name, runs in seeds.items()
            if len(runs) == 1 or value in runs
        }
        yield Ranking({**setting, "seed": value}, group.compared.keys, scores)


def _by_question(
    group: BenchmarkRuns,
    setting: Mapping[str, str | None],
    points: Mapping[str, Sequence[RunScores]],
) -> Iterator[Ranking]:
    """Yield the ranking of each kind of question: the metrics `<headline>_<kind>` that only some samples have."""
    scorings = {name: group.result(runs[0]).scorings() for name, runs in points.items()}
    first = next(iter(scorings.values()))
    start = f"{group.metric}_"
    metrics = {name for scoring in first.values() for name in scoring.scores}
    kinds = sorted(name for name in metrics if name.startswith(start))
    # Kinds of kinds are left out: `accuracy_attr` and not `accuracy_attr_digit`.
    tops = [name for name in kinds if not any(name.startswith(f"{kind}_") for kind in kinds)]
    for kind in tops:
        keys = sorted(key for key, scoring in first.items() if kind in scoring.scores)
        if 1 < len(keys) < len(first):
            scores = {
                name: np.array([scoring[key].scores[kind] for key in keys])
                for name, scoring in scorings.items()
            }
            yield Ranking({**setting, "question": kind.removeprefix(start)}, keys, scores)


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


def _weights(keys: Sequence[Key]) -> Array:
    """Return exponential weights (DRAWS, samples); a sample has the same ones in every setting."""
    columns = [np.random.default_rng(_checksum(key)).standard_exponential(DRAWS) for key in keys]
    return np.stack(columns, axis=1)


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
        even = np.ones((1, len(ranking.keys)))
        observed.append(ranking.means(methods, even)[0])
        drawn.append(ranking.means(methods, _weights(ranking.keys)))
    tau = _tau(observed[0], observed[1])
    taus = np.array([_tau(*draws) for draws in zip(*drawn, strict=True)])
    repeated = fmean(
        _tau(means, draw) for means, draws in zip(observed, drawn, strict=True) for draw in draws
    )
    return tau, taus, repeated


def _line(
    dimension: str,
    pair: tuple[Ranking, Ranking, Sequence[str]],
    tau: float,
    taus: Array,
    repeated: float,
) -> dict[str, Cell]:
    first, second, methods = pair
    constants = [
        str(value)
        for name, value in first.setting.items()
        if name not in (dimension, "rule") and value is not None
    ]
    return {
        "dimension": dimension,
        "first": first.setting[dimension],
        "second": second.setting[dimension],
        "in": ", ".join(constants),
        "methods": len(methods),
        "tau": _interval(tau, taus),
        "repeated": repeated,
    }


def _mean_line(
    dimension: str,
    lines: Sequence[Mapping[str, Cell]],
    drawn: Sequence[tuple[float, Array, float]],
) -> dict[str, Cell]:
    tau = fmean(tau for tau, _, _ in drawn)
    return {
        **lines[0],
        "first": "mean",
        "second": f"of {len(drawn)} pairs",
        "in": "",
        "methods": None,
        "tau": _interval(tau, np.mean([taus for _, taus, _ in drawn], axis=0)),
        "repeated": fmean(repeated for _, _, repeated in drawn),
        "dimension": dimension,
    }


def _interval(tau: float, taus: Array) -> Interval:
    # Draws add chance to that of the samples, and so lie lower: the estimate may be above all of them.
    low, high = np.quantile(taus, ENDS)
    return Interval(tau, min(float(low), tau), max(float(high), tau))


def _plot(lines: Sequence[Mapping[str, Cell]]) -> Plot:
    names: dict[float, str] = {
        row: f"{line['dimension']}: {line['first']} {line['second']}"
        for row, line in enumerate(lines)
    }
    taus, repeated = [], []
    for row, line in enumerate(lines):
        tau, own_tau = line["tau"], line["repeated"]
        assert isinstance(tau, Interval)  # by `_line`
        assert isinstance(own_tau, float)
        taus.append(Spot(row, tau.value, tau.low, tau.high))
        repeated.append(Spot(row, own_tau))
    heads = frozenset(row for row, line in enumerate(lines) if line["first"] == "mean")
    series = [
        Series("tau between two settings", taus, marker("o", color=INK, zorder=4), key=True),
        Series("a setting with its own draws", repeated, marker("|", color=NOTE), key=True),
    ]
    return Plot("dots", "Kendall's tau", series, ticks=names, heads=heads)
