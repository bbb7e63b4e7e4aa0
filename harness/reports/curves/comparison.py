"""Comparison of stored runs: floors, intervals, paired tests, their corrections, retention and averages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import pandas as pd

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.curve_points import (
    CONTROLS,
    FLOORS,
    FULL,
    POINT,
    CurvePanel,
    Scores,
    only,
)
from espalier.harness.reports.curves.point_frame import UNPRUNED, PointFrame
from espalier.harness.reports.curves.stored_rows import (
    RunScores,
    filter_results,
    newest_per_cell,
    read_results,
    read_run_scores,
    select_model,
    with_settings,
)
from espalier.harness.reports.frame import POINTS, StoredResult, typed
from espalier.harness.settings import choice
from espalier.harness.specs.comparable import Row, grouped, passed_over, policy, sweep_names
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
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.row_text import FOOTNOTE, amount_text, is_marked, mark

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
        choice("--benchmarks", name, present)
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
    runs: dict[str, dict[float, list[RunScores]]] = {}
    for run in sorted(compared.runs, key=lambda run: run.row["ratio"]):
        runs.setdefault(run.name, {}).setdefault(run.row["ratio"], []).append(run)
    # Average over seeds first, so that each sample counts once.
    scores = {
        (name, ratio): by_unit(compared.scores(group), compared.units)
        for name, by_ratio in runs.items()
        for ratio, group in by_ratio.items()
    }
    first_runs = {run.name: run for run in reversed(compared.runs)}
    controls = {name: run.row["method"] in CONTROLS for name, run in first_runs.items()}
    full_name = next((name for name, run in first_runs.items() if run.row["method"] == FULL), None)
    full = None if full_name is None else scores[full_name, min(runs.pop(full_name))]
    floors = [run for run in first_runs.values() if run.row["method"] in FLOORS]
    lines = []
    for name in sorted(runs, key=lambda name: (controls[name], name)):
        floor = _floor(first_runs[name], floors, nearest)
        floor = None if floor == name else floor
        shared = {"control": controls[name], "floor": floor, "layer": first_runs[name].layer}
        lines += [
            {
                **{"curve": name, **shared},
                **_point(group, scores[name, ratio], scores.get((floor or "", ratio)), full),
            }
            for ratio, group in runs[name].items()
        ]
    points = pd.DataFrame(lines, columns=POINT, dtype=object)
    higher = compared.row["extra"].get("higher_is_better", True)
    corrected = {
        "gain_p_holm": _corrected(points.gain_p),
        "lost_p": _corrected(points.lost_p),
        "best_p": _against_best(points, higher),
    }
    unread = {run.name for run in compared.runs if is_marked(run.row)}
    return CurvePanel(
        model=compared.row["model"],
        benchmark=benchmark,
        metric=compared.metric,
        n_samples=compared.n_samples,
        full=None if full is None else mean_interval(full),
        points=points.assign(**corrected),
        unpruned=full,
        full_mark=mark(full_name in unread),
        notes=(
            *(*notes, *compared.notes, *_single_token_note(compared.runs)),
            *_floorless_notes(points, [*first_runs.values()]),
            *[FOOTNOTE] * bool(unread),
        ),
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
        # At ratio 0 nothing is removed.
        return grouped(
            ((run.name, run.row["ratio"], run.row.get("keep")), run)
            for run in self.runs
            if run.row["method"] != FULL and run.row["ratio"] > 0
        )

    def scores(self, runs: Sequence[RunScores]) -> Scores:
        """Return the score of each sample, seeds averaged."""
        table = [[run.scores[key] for key in self.keys] for run in runs]
        return cast("Scores", np.mean(table, axis=0))


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
    lines: list[dict[str, Any]] = []
    for panel in panels:
        points = panel.points.to_dict("records")
        if panel.full is not None:
            unpruned = {"curve": UNPRUNED, "control": True, "ratio": 0.0, "score": panel.full}
            points.insert(0, {**unpruned, "flops_share": 1.0, "unread": bool(panel.full_mark)})
        shared = {
            "model": panel.model,
            "benchmark": panel.benchmark,
            "metric": panel.metric,
            "n_samples": panel.n_samples,
        }
        lines += [{**shared, **point, **_numbers(point)} for point in points]
    return PointFrame(typed({name: [line.get(name) for line in lines] for name in POINTS}, POINTS))


def _numbers(point: Mapping[str, Any]) -> dict[str, float]:
    """Return the intervals of a point as numbers, by the columns of `POINTS`."""
    return {
        column: number
        for quantity in ("score", "retention", "gain")
        if isinstance(interval := point.get(quantity), Interval)
        for column, number in interval.named(quantity).items()
    }


def averages(panels: Sequence[CurvePanel]) -> pd.DataFrame:
    """Return the mean retention of each (curve, amount) that all panels have with an unpruned score above zero.

    All benchmarks have the same weight; samples are resampled within each benchmark. The columns are `curve`, `amount`,
    `ratio` and `keep` of the first panel, `unread` and `retention`, an Interval.
    """
    columns = ["curve", "amount", "ratio", "keep", "unread", "retention"]
    every = pd.concat([panel.points.assign(panel=place) for place, panel in enumerate(panels)])
    paired = every[every.retention.notna()]
    lines = []
    for _, cells in paired.groupby(["curve", "amount"], sort=False):
        pairs = [
            (ours, full)
            for ours, place in zip(cells.scores, cells.panel, strict=True)
            if (full := panels[place].unpruned) is not None
        ]
        if len(pairs) == len(panels):
            first = cells.iloc[0]
            lines.append((*first[columns[:4]], cells.unread.any(), average_retention(pairs)))
    return pd.DataFrame(lines, columns=columns, dtype=object)


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


def _floorless_notes(points: pd.DataFrame, runs: Sequence[RunScores]) -> list[str]:
    """Return a line for each layer at which methods remove tokens and random dropping did not run."""
    lacking = set(points.curve[~points.control.astype(bool) & points.floor.isna()])
    layers = grouped(
        (run.layer, run.name) for run in runs if run.name in lacking and run.layer is not None
    )
    return [
        f"{', '.join(names)}: no points above random, which did not run at the same place; "
        f"valid: method=random{f' method.params.layer={layer}' if layer else ''}"
        for layer, names in layers.items()
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
    runs: Sequence[RunScores], scores: Scores, floor: Scores | None, full: Scores | None
) -> dict[str, Any]:
    """Return the point of one curve at one ratio, p-values uncorrected; `runs` differ in their seed."""
    ratio, keep = runs[0].row["ratio"], only([run.row.get("keep") for run in runs])
    # At ratio 0 nothing is removed, so there is no gain.
    floor = None if ratio == 0 else floor
    unpruned = full if full is not None and full.mean() > 0 else None
    unread = any(is_marked(run.row) for run in runs)
    return {
        "ratio": ratio,
        "keep": keep,
        "amount": ratio if keep is None else amount_text(ratio, keep),
        "score": mean_interval(scores),
        "retention": None if unpruned is None else retained(scores, unpruned),
        "gain": None if floor is None else difference_interval(scores, floor),
        "gain_p": None if floor is None else paired_pvalue(scores, floor),
        "lost_p": None if unpruned is None or ratio == 0 else paired_pvalue(scores, unpruned),
        "flops_share": fmean(run.row["flops"]["share_of_full"] for run in runs),
        "scores": scores,
        "unread": unread,
        "mark": mark(unread),
    }


def _against_best(points: pd.DataFrame, higher: bool) -> pd.Series:
    """Return the corrected p-value of each method against the best at its ratio, 1 for the best, None for controls."""
    pvalues, best = pd.Series(None, points.index, dtype=object), []
    for _, cells in points[~points.control.astype(bool)].groupby("ratio"):
        means = cells.score.map(lambda score: score.value if higher else -score.value)
        best.append(means.astype(float).idxmax())
        for place, scores in cells.scores.drop(best[-1]).items():
            pvalues[place] = paired_pvalue(cells.scores[best[-1]], scores)
    corrected = _corrected(pvalues)
    corrected[best] = 1.0
    return corrected


def _corrected(pvalues: pd.Series) -> pd.Series:
    """Return the p-values of a panel after Holm's correction over those that there are."""
    defined_values = pvalues.dropna()
    return pd.Series(holm([*defined_values]), defined_values.index, dtype=object).reindex(
        pvalues.index
    )
