"""Turn rows and per-sample scores of a store into curve points with intervals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.reports.curves.run_scores import RunScores, read_run_scores
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
    filter_results,
    newest_per_cell,
    read_results,
    select_model,
    with_settings,
)
from espalier.harness.specs.comparable import passed_over, sweep_names
from espalier.harness.stats import (
    Interval,
    by_unit,
    difference_interval,
    holm,
    mean_interval,
    paired_pvalue,
)
from espalier.harness.stats import retention_interval as retained
from espalier.harness.store.amount_text import amount_text
from espalier.harness.store.unparsed_mark import FOOTNOTE, mark

#: The method without reduction, the random baseline, and all controls (methods that no paper proposes).
FULL = "none"
FLOOR = "random"
CONTROLS = (FLOOR, "uniform", "pooled", "random_kv", "uniform_kv", "recent_kv")

#: Random baselines: of tokens and of cache entries.
FLOORS = (FLOOR, "random_kv")


@dataclass(frozen=True)
class CurvePoint:
    """One method at one ratio.

    Attributes:
        ratio: share of visual tokens removed.
        score: mean over samples (seeds averaged first).
        retention: score divided by the unpruned score, paired by sample; None without an unpruned run.
        gain: score minus that of random dropping at the same layer under the same policy; None without such a run.
        pvalue: of the paired test of `gain`: McNemar's for right/wrong scores, else a permutation test.
        corrected_pvalue: `pvalue` after Holm's correction over all comparisons with random dropping in the panel.
        loss_pvalue: of the paired test against the unpruned model, Holm-corrected over the panel.
        flops: share of the unreduced prefill's FLOPs; at equal token counts, methods at later layers cost more.
        unread: whether too many answers of one of its runs could not be read.
        keep: tokens that stay of each sample, where the runs set that and not the ratio.
    """

    ratio: float
    score: Interval
    retention: Interval | None = None
    gain: Interval | None = None
    pvalue: float | None = None
    flops: float | None = None
    corrected_pvalue: float | None = None
    loss_pvalue: float | None = None
    scores: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    unread: bool = False
    keep: int | None = None

    @property
    def mark(self) -> str:
        """The footnote mark after its numbers, or empty."""
        return mark(self.unread)

    @property
    def amount(self) -> float | str:
        """What points of several benchmarks have in common: the ratio, or `64 tokens`, which are other shares there."""
        return self.ratio if self.keep is None else amount_text(self.ratio, self.keep)


@dataclass(frozen=True)
class Curve:
    """All points of one method by increasing ratio.

    Attributes:
        floor: name of the random baseline's curve that `gain` refers to.
        layer: decoder layer before which tokens are first removed, 0 for any site before the decoder.
    """

    name: str
    control: bool
    floor: str | None
    points: tuple[CurvePoint, ...]
    layer: int | None = None


@dataclass(frozen=True)
class CurvePanel:
    """One benchmark: its headline metric, the unpruned score if measured, and the curves.

    Attributes:
        full: the unpruned score.
        notes: lines on excluded results and on marks.
        full_mark: footnote mark of `full`.
        unpruned: the unpruned model's score of each unit of statistics, as `scores` of a point.
    """

    benchmark: str
    metric: str
    n_samples: int
    full: Interval | None
    curves: tuple[Curve, ...]
    notes: tuple[str, ...] = ()
    full_mark: str = ""
    unpruned: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)

    @property
    def ratios(self) -> tuple[float, ...]:
        """All ratios that some curve has, increasing."""
        return tuple(sorted({point.ratio for curve in self.curves for point in curve.points}))

    def keep(self, ratio: float) -> int | None:
        """Return the tokens that stay at a ratio, if all points there set them and not the ratio."""
        points = (point for curve in self.curves for point in curve.points)
        keeps = {point.keep for point in points if point.ratio == ratio}
        return keeps.pop() if len(keeps) == 1 else None

    def heading(self, ratio: float) -> str:
        """Return the heading of the points at a ratio: the share kept, `10 %`, or `64 tokens (11.11 %)`."""
        keep = self.keep(ratio)
        return share(ratio) if keep is None else f"{amount_text(ratio, keep)} ({share(ratio)})"


def share(ratio: float) -> str:
    """Return the share that stays at a ratio, in percent."""
    return f"{100 * (1 - ratio):.4g} %"


def read_panels(
    store: Path,
    benchmarks: Sequence[str],
    model: str | None = None,
    rule: str = "kept",
    run_keys: Collection[str] | None = None,
    nearest: bool = False,
    where: Sequence[str] = (),
    swept: bool = False,
) -> list[CurvePanel]:
    """Return one panel for each benchmark, or for all benchmarks of the store in alphabetical order if empty.

    If several results differ only in code version, the newest is used. Only results with the largest number of samples
    count, because curves are compared sample by sample. Results without settings are skipped. A curve's floor is random
    dropping at the same layer under the same policy; with `nearest`, a method between layers without such a floor uses
    the nearest random dropping between layers.

    Args:
        store: root of the run store.
        benchmarks: names, in the order of the panels.
        model: required if the store has several.
        rule: budget rule of the results.
        run_keys: restrict to these runs.
        nearest: see above.
        where: `key=value` conditions on settings (harness/specs/comparable.py).
        swept: whether curves are named by every hyper-parameter in which those of their method differ.

    Raises:
        UserError: a benchmark has no results, there are several models and `model` is None, results differ in a setting
            that must be the same, or a run lacks per-sample scores.
    """
    results = [
        result
        for result in read_results(store)
        if result.row["budget_rule"] == rule
        and (run_keys is None or result.row["run_key"] in run_keys)
    ]
    if not results:
        raise UserError(f"store={str(store)!r} holds no finished runs with budget={rule}")
    results = select_model(results, model)
    present = sorted({result.row["benchmark"] for result in results})
    panels = []
    for name in benchmarks or present:
        if name not in present:
            raise unknown_name("--benchmarks", name, present)
        selected, notes = with_settings(
            [result for result in results if result.row["benchmark"] == name]
        )
        panels.append(panel_of(name, filter_results(selected, where), nearest, notes, swept))
    return panels


def panel_of(
    benchmark: str,
    results: Sequence[StoredResult],
    nearest: bool = False,
    notes: Sequence[str] = (),
    swept: bool = False,
) -> CurvePanel:
    """Return the panel of one benchmark.

    Args:
        benchmark: its name.
        results: of one model and one budget rule, all with settings, oldest first.
        nearest: as for `read_panels`.
        notes: first lines of the panel's notes.
        swept: as for `read_panels`.

    Raises:
        UserError: as `read_panels`.
    """
    n_samples = max(result.row["n_samples"] for result in results)
    complete = [result for result in results if result.row["n_samples"] == n_samples]
    newest = newest_per_cell(complete)
    runs = [read_run_scores(result) for result in newest]
    if swept:
        names = sweep_names([result.row for result in newest])
        # Random dropping has one name in every report, also where it runs at several layers.
        runs = [
            run if run.method in FLOORS else replace(run, name=name)
            for run, name in zip(runs, names, strict=True)
        ]
    if len({frozenset(run.scores) for run in runs}) > 1:
        raise UserError(
            f"{benchmark}: runs with {n_samples} samples each do not share their samples"
        )
    if any(run.units != runs[0].units for run in runs):
        raise UserError(f"{benchmark}: runs differ in which samples are one unit of statistics")
    keys = sorted(runs[0].scores)
    units = [runs[0].units[key] for key in keys]
    groups: dict[str, dict[float, NDArray[np.float64]]] = {}
    first_runs = {run.name: run for run in reversed(runs)}
    for name in first_runs:
        for ratio in sorted({run.ratio for run in runs if run.name == name}):
            seeds = [run for run in runs if (run.name, run.ratio) == (name, ratio)]
            # Average over seeds first, so that each sample counts once.
            mean = np.mean([[run.scores[key] for key in keys] for run in seeds], axis=0)
            groups.setdefault(name, {})[ratio] = by_unit(mean, units)
    unpruned_name = next((name for name, run in first_runs.items() if run.method == FULL), None)
    unpruned = {} if unpruned_name is None else groups.pop(unpruned_name)
    full = unpruned[min(unpruned)] if unpruned else None
    floors = {
        (run.policy, run.layer, run.evicts): name
        for name, run in first_runs.items()
        if run.method in FLOORS
    }
    unread = {(run.name, run.ratio) for run in runs if run.unread}
    keeps: dict[tuple[str, float], set[int | None]] = {}
    for run in runs:
        keeps.setdefault((run.name, run.ratio), set()).add(run.keep)
    costs = {
        name: {ratio: _cost(runs, name, ratio) for ratio in ratios}
        for name, ratios in groups.items()
    }
    curves = [
        _curve(
            first_runs[name],
            groups,
            costs[name],
            _floor(first_runs[name], floors, nearest),
            full,
            unread,
            keeps,
        )
        for name in sorted(groups, key=lambda name: (first_runs[name].method in CONTROLS, name))
    ]
    return CurvePanel(
        benchmark=benchmark,
        metric=runs[0].metric,
        n_samples=n_samples,
        full=None if full is None else _mean(full),
        curves=_corrected(curves),
        unpruned=full,
        full_mark=mark(any(name == unpruned_name for name, _ in unread)),
        notes=(
            *notes,
            *passed_over(len(results) - len(complete), f"with fewer than {n_samples} samples"),
            *passed_over(len(complete) - len(newest), "of other code, a newer one has their place"),
            *_single_token_note(runs),
            *([FOOTNOTE] if unread else []),
        ),
    )


def _single_token_note(runs: Sequence[RunScores]) -> list[str]:
    """Return a line if all answers, of evicting and of unpruned runs, are one token long."""
    evicting = [run for run in runs if run.discriminates is not None]
    if not evicting or any(run.discriminates for run in evicting):
        return []
    if any(run.method == FULL and not run.single_token for run in runs):
        return []
    names = ", ".join(sorted({run.name for run in evicting}))
    return [
        f"{names}: every answer is one token, chosen before cache entries go; scores say nothing of them"
    ]


def _cost(runs: Iterable[RunScores], name: str, ratio: float) -> float:
    """Return the mean share of FLOPs of a curve's runs at one ratio."""
    return fmean(run.flops for run in runs if (run.name, run.ratio) == (name, ratio))


def _floor(
    run: RunScores, floors: Mapping[tuple[str, int | None, bool], str], nearest: bool
) -> str | None:
    """Return the name of the random baseline for a run: same layer, same policy."""
    by_layer = {
        layer: name
        for (policy, layer, evicts), name in floors.items()
        if policy == run.policy and evicts == run.evicts
    }
    if run.layer in by_layer or not nearest or not run.layer:
        return by_layer.get(run.layer)
    layer = run.layer
    layers = [candidate for candidate in by_layer if candidate]
    return (
        by_layer[min(layers, key=lambda candidate: (abs(candidate - layer), candidate))]
        if layers
        else None
    )


def _curve(
    run: RunScores,
    groups: Mapping[str, Mapping[float, NDArray[np.float64]]],
    costs: Mapping[float, float],
    floor: str | None,
    full: NDArray[np.float64] | None,
    unread: Collection[tuple[str, float]],
    keeps: Mapping[tuple[str, float], Collection[int | None]],
) -> Curve:
    points = []
    for ratio, scores in groups[run.name].items():
        floor_scores = groups[floor].get(ratio) if floor not in (None, run.name) else None
        # At ratio 0 nothing is removed, so there is no gain.
        floor_scores = None if ratio == 0 else floor_scores
        unpruned = full if full is not None and full.mean() > 0 else None
        retention = None if unpruned is None else retained(scores, unpruned)
        points.append(
            CurvePoint(
                ratio=ratio,
                score=_mean(scores),
                retention=retention,
                gain=None if floor_scores is None else difference_interval(scores, floor_scores),
                pvalue=None if floor_scores is None else paired_pvalue(scores, floor_scores),
                flops=costs[ratio],
                loss_pvalue=None
                if unpruned is None or ratio == 0
                else paired_pvalue(scores, unpruned),
                scores=scores,
                unread=(run.name, ratio) in unread,
                keep=_only(keeps[run.name, ratio]),
            )
        )
    floor = None if floor == run.name else floor
    return Curve(run.name, run.method in CONTROLS, floor, tuple(points), run.layer)


def _only(keeps: Collection[int | None]) -> int | None:
    """Return the one count of tokens of a point's runs; None if they differ or set the ratio."""
    return next(iter(keeps)) if len(keeps) == 1 else None


def _corrected(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Correct the p-values of a panel: against random dropping and against the unpruned model separately."""
    points = [point for curve in curves for point in curve.points]
    gains = [point.pvalue for point in points if point.pvalue is not None]
    losses = [point.loss_pvalue for point in points if point.loss_pvalue is not None]
    corrected_gains, corrected_losses = iter(holm(gains)), iter(holm(losses))
    corrected = [
        replace(
            point,
            corrected_pvalue=None if point.pvalue is None else next(corrected_gains),
            loss_pvalue=None if point.loss_pvalue is None else next(corrected_losses),
        )
        for point in points
    ]
    remaining = iter(corrected)
    return tuple(
        replace(curve, points=tuple(next(remaining) for _ in curve.points)) for curve in curves
    )


def _mean(scores: Iterable[float]) -> Interval:
    return mean_interval(np.asarray(list(scores)))
