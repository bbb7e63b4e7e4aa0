"""Comparison of stored runs: floors, intervals, paired tests, their corrections, retention and averages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.evaluation.samples import Key
from espalier.harness.reports.curves.curve_points import (
    CONTROLS,
    FLOORS,
    FULL,
    Curve,
    CurvePanel,
    CurvePoint,
    Scores,
    only,
)
from espalier.harness.reports.curves.stored_rows import (
    RunScores,
    StoredResult,
    filter_results,
    newest_per_cell,
    read_results,
    read_run_scores,
    select_model,
    with_settings,
)
from espalier.harness.reports.frame import POINTS, UNPRUNED, PointFrame, typed
from espalier.harness.specs.comparable import Row, passed_over, policy, sweep_names
from espalier.harness.stats import (
    Interval,
    average_retention,
    by_unit,
    difference_interval,
    holm,
    mean_interval,
    paired_pvalue,
)
from espalier.harness.stats import retention_interval as retained
from espalier.harness.store.row_text import FOOTNOTE, is_marked, mark

#: A method at one amount: the name of its curve, the share removed, and the tokens kept where these were set.
MethodPoint = tuple[str, float, int | None]


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
    compared = runs_of(benchmark, results, swept)
    runs = compared.runs
    seeds: dict[str, dict[float, list[RunScores]]] = {}
    for run in sorted(runs, key=lambda run: run.row["ratio"]):
        seeds.setdefault(run.name, {}).setdefault(run.row["ratio"], []).append(run)
    # Average over seeds first, so that each sample counts once.
    scores = {
        name: {
            ratio: by_unit(compared.scores(group), compared.units)
            for ratio, group in by_ratio.items()
        }
        for name, by_ratio in seeds.items()
    }
    first_runs = {run.name: run for run in reversed(runs)}
    methods = {name: run.row["method"] for name, run in first_runs.items()}
    unpruned_name = next((name for name, method in methods.items() if method == FULL), None)
    unpruned = {} if unpruned_name is None else scores.pop(unpruned_name)
    full = unpruned[min(unpruned)] if unpruned else None
    floors = [run for name, run in first_runs.items() if methods[name] in FLOORS]
    curves = []
    for name in sorted(scores, key=lambda name: (methods[name] in CONTROLS, name)):
        floor = _floor(first_runs[name], floors, nearest)
        floor = None if floor == name else floor
        points = tuple(
            _point(group, ratio, scores[name][ratio], scores.get(floor or "", {}).get(ratio), full)
            for ratio, group in seeds[name].items()
        )
        curves.append(Curve(name, methods[name] in CONTROLS, floor, points, first_runs[name].layer))
    unread = {run.name for run in runs if is_marked(run.row)}
    return CurvePanel(
        benchmark=benchmark,
        metric=compared.metric,
        n_samples=compared.n_samples,
        full=None if full is None else mean_interval(full),
        curves=_corrected(curves),
        unpruned=full,
        full_mark=mark(unpruned_name in unread),
        notes=(*notes, *compared.notes, *_single_token_note(runs), *[FOOTNOTE] * bool(unread)),
    )


@dataclass(frozen=True)
class ComparedRuns:
    """The runs of one benchmark that share their samples.

    Attributes:
        n_samples: the largest number of samples that a run has; others are left out.
        runs: the newest of each cell, oldest first.
        keys: all samples, ascending.
        units: the unit of statistics of each of `keys`.
        notes: lines that count the runs left out.
    """

    n_samples: int
    runs: Sequence[RunScores]
    keys: Sequence[Key]
    units: Sequence[Key]
    notes: tuple[str, ...]

    @property
    def row(self) -> Row:
        """The row of the first run, for what all share: model, benchmark and budget rule."""
        return self.runs[0].row

    @property
    def metric(self) -> str:
        """The headline metric."""
        return str(self.row["extra"]["headline"])

    @property
    def unpruned(self) -> Scores | None:
        """The unpruned model's score of each sample, None if it did not run."""
        full = [run for run in self.runs if run.row["method"] == FULL]
        return self.scores(full[:1]) if full else None

    @property
    def points(self) -> dict[MethodPoint, list[RunScores]]:
        """The runs of each method at each amount, one for each seed."""
        points: dict[MethodPoint, list[RunScores]] = {}
        for run in self.runs:
            # At ratio 0 nothing is removed.
            if run.row["method"] != FULL and run.row["ratio"] > 0:
                points.setdefault((run.name, run.row["ratio"], run.row.get("keep")), []).append(run)
        return points

    def scores(self, runs: Sequence[RunScores]) -> Scores:
        """Return the score of each sample, seeds averaged."""
        averaged: Scores = np.mean([[run.scores[key] for key in self.keys] for run in runs], axis=0)
        return averaged


def runs_of(benchmark: str, results: Sequence[StoredResult], swept: bool = False) -> ComparedRuns:
    """Return the runs of one benchmark that can be compared sample by sample; arguments as of `panel_of`.

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
            run if run.row["method"] in FLOORS else replace(run, name=name)
            for run, name in zip(runs, names, strict=True)
        ]
    if len({frozenset(run.scores) for run in runs}) > 1:
        raise UserError(
            f"{benchmark}: runs with {n_samples} samples each do not share their samples"
        )
    if any(run.units != runs[0].units for run in runs):
        raise UserError(f"{benchmark}: runs differ in which samples are one unit of statistics")
    keys = sorted(runs[0].scores)
    return ComparedRuns(
        n_samples=n_samples,
        runs=runs,
        keys=keys,
        units=[runs[0].units[key] for key in keys],
        notes=(
            *passed_over(len(results) - len(complete), f"with fewer than {n_samples} samples"),
            *passed_over(len(complete) - len(newest), "of other code, a newer one has their place"),
        ),
    )


def points_of(panels: Sequence[CurvePanel]) -> PointFrame:
    """Return a line for each point of panels; the unpruned model has its own, `none` at ratio 0."""
    lines = []
    for panel in panels:
        curves = panel.curves
        if panel.full is not None:
            point = CurvePoint(0.0, panel.full, flops=1.0, unread=bool(panel.full_mark))
            curves = (Curve(UNPRUNED, True, None, (point,)), *curves)
        lines += [
            {
                **{
                    "benchmark": panel.benchmark,
                    "metric": panel.metric,
                    "n_samples": panel.n_samples,
                },
                **{"curve": curve.name, "control": curve.control, "floor": curve.floor},
                **{"ratio": point.ratio, "keep": point.keep, "flops_share": point.flops},
                **point.score.named("score"),
                **(point.retention.named("retention") if point.retention else {}),
                **(point.gain.named("gain") if point.gain else {}),
                "lost_p": point.loss_pvalue,
                "gain_p": point.pvalue,
                "gain_p_holm": point.corrected_pvalue,
                "unread": point.unread,
            }
            for curve in curves
            for point in curve.points
        ]
    return PointFrame(typed({name: [line.get(name) for line in lines] for name in POINTS}, POINTS))


def averages(panels: Sequence[CurvePanel]) -> dict[tuple[str, float | str], Interval]:
    """Return the mean retention of each (curve, amount) that all panels have with an unpruned score above zero.

    All benchmarks have the same weight; samples are resampled within each benchmark.
    """
    pairs: dict[tuple[str, float | str], list[tuple[Scores, Scores]]] = {}
    for panel in panels:
        for curve in panel.curves:
            for point in curve.points:
                if point.retention and point.scores is not None and panel.unpruned is not None:
                    pair = (point.scores, panel.unpruned)
                    pairs.setdefault((curve.name, point.amount), []).append(pair)
    return {
        key: average_retention(scores)
        for key, scores in pairs.items()
        if len(scores) == len(panels)
    }


def _single_token_note(runs: Sequence[RunScores]) -> list[str]:
    """Return a line if all answers, of evicting and of unpruned runs, are one token long."""
    # Missing in rows of older versions.
    evicting = [run for run in runs if run.row["extra"].get("discriminates") is not None]
    unpruned = [run.row["extra"] for run in runs if run.row["method"] == FULL]
    if (
        not evicting
        or any(run.row["extra"]["discriminates"] for run in evicting)
        or any(extra.get("first_token") != 1 for extra in unpruned)
    ):
        return []
    names = ", ".join(sorted({run.name for run in evicting}))
    return [
        f"{names}: every answer is one token, chosen before cache entries go; scores say nothing of them"
    ]


def _floor(run: RunScores, floors: Sequence[RunScores], nearest: bool) -> str | None:
    """Return the name of the random baseline for a run: same layer, same policy."""
    by_layer = {
        floor.layer: floor.name
        for floor in floors
        if policy(floor.row) == policy(run.row) and floor.evicts == run.evicts
    }
    layers = [layer for layer in by_layer if layer]
    if run.layer in by_layer or not nearest or not run.layer or not layers:
        return by_layer.get(run.layer)
    place = run.layer
    return by_layer[min(layers, key=lambda layer: (abs(layer - place), layer))]


def _point(
    runs: Sequence[RunScores],
    ratio: float,
    scores: Scores,
    floor: Scores | None,
    full: Scores | None,
) -> CurvePoint:
    """Return the point of one curve at one ratio, p-values uncorrected; `runs` differ in their seed."""
    # At ratio 0 nothing is removed, so there is no gain.
    floor = None if ratio == 0 else floor
    unpruned = full if full is not None and full.mean() > 0 else None
    return CurvePoint(
        ratio=ratio,
        score=mean_interval(scores),
        retention=None if unpruned is None else retained(scores, unpruned),
        gain=None if floor is None else difference_interval(scores, floor),
        pvalue=None if floor is None else paired_pvalue(scores, floor),
        flops=fmean(run.row["flops"]["share_of_full"] for run in runs),
        loss_pvalue=None if unpruned is None or ratio == 0 else paired_pvalue(scores, unpruned),
        scores=scores,
        unread=any(is_marked(run.row) for run in runs),
        keep=only([run.row.get("keep") for run in runs]),
    )


def _corrected(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Correct the p-values of a panel: against random dropping and against the unpruned model separately."""
    points = [point for curve in curves for point in curve.points]
    gains = iter(holm([point.pvalue for point in points if point.pvalue is not None]))
    losses = iter(holm([point.loss_pvalue for point in points if point.loss_pvalue is not None]))
    return tuple(
        replace(
            curve,
            points=tuple(
                replace(
                    point,
                    corrected_pvalue=None if point.pvalue is None else next(gains),
                    loss_pvalue=None if point.loss_pvalue is None else next(losses),
                )
                for point in curve.points
            ),
        )
        for curve in curves
    )
