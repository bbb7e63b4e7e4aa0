"""From rows and per-sample scores in the store to points with intervals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.evaluation.samples import Key
from espalier.harness.reports.curves.stored_rows import (
    Stored,
    chosen,
    of_model,
    one_of_each,
    stored,
    telling,
)
from espalier.harness.specs.comparable import name as name_of
from espalier.harness.specs.comparable import passed_over, policy
from espalier.harness.stats import (
    Interval,
    by_unit,
    difference_interval,
    holm,
    mean_interval,
    paired_pvalue,
)
from espalier.harness.stats import retention_interval as retained
from espalier.harness.store.unparsed_mark import FOOTNOTE, is_marked, mark

#: Method without reduction, and methods that no paper proposes: the floor every other is read by.
FULL = "none"
FLOOR = "random"
CONTROLS = (FLOOR, "uniform", "pooled", "random_kv", "uniform_kv", "recent_kv")

#: Random choices: of tokens, of cache entries.
FLOORS = (FLOOR, "random_kv")


@dataclass(frozen=True)
class Run:
    """One row with the contribution of each sample to the headline; tokens go first at layer `place`.

    `evicts` says whether cache entries go and no token does.

    `units` says which samples are one unit of statistics: (task, first document) of each.

    `name` is that of its curve: method, what differs from its defaults, and the engine's `policy` where it does.
    `flops` is the share of the unreduced prefill. `single` is whether every answer is one token; `discriminates`,
    of rows that evict cache entries, whether any is not. `unread` is whether too many answers could not be read.
    """

    name: str
    method: str
    policy: str
    ratio: float
    place: int | None
    evicts: bool
    metric: str
    flops: float
    scores: Mapping[Key, float]
    units: Mapping[Key, Key]
    discriminates: bool | None = None
    single: bool = False
    unread: bool = False


@dataclass(frozen=True)
class Point:
    """One method at one ratio.

    Attributes:
        ratio: share of visual tokens removed.
        score: mean over samples (seeds averaged first).
        retention: score over the unpruned score, paired by sample; None without an unpruned run.
        gain: score minus that of random dropping at the same place under the same policy; None where there is none.
        pvalue: of the paired test behind `gain`: McNemar's of answers right or wrong, else permutation.
        chance: `pvalue` corrected (Holm) for all comparisons with random dropping in the panel.
        lost: p-value of the paired test against the unpruned model, corrected for all of these in the panel.
        flops: share of the unreduced prefill's FLOPs: methods that act later cost more at the same count of tokens.
        unread: whether too many answers of one of its runs could not be read.
    """

    ratio: float
    score: Interval
    retention: Interval | None = None
    gain: Interval | None = None
    pvalue: float | None = None
    flops: float | None = None
    chance: float | None = None
    lost: float | None = None
    scores: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    unread: bool = False

    @property
    def mark(self) -> str:
        """What stands behind its numbers."""
        return mark(self.unread)


@dataclass(frozen=True)
class Curve:
    """All points of one method, by increasing ratio; `floor` names the curve behind `gain`.

    `place` is the decoder layer before which tokens first go, 0 for all that happens before the decoder.
    """

    name: str
    control: bool
    floor: str | None
    points: tuple[Point, ...]
    place: int | None = None


@dataclass(frozen=True)
class Panel:
    """One benchmark: its headline metric, the unpruned score if measured, and the curves.

    `notes` say which rows are not in it and what a mark means, a line each; `full_mark` stands behind `full`;
    `unpruned` has the unreduced model's score of each unit, as a point's `scores` have its own.
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


def read_panels(
    store: Path,
    benchmarks: Sequence[str],
    model: str | None = None,
    rule: str = "kept",
    run_keys: Collection[str] | None = None,
    nearest: bool = False,
    where: Sequence[str] = (),
) -> list[Panel]:
    """Return a panel for each benchmark (for all in the store, in alphabetical order, if empty).

    Of several rows of one cell under the same settings, which are of different code, the newest counts, and only rows
    with the largest number of samples, because curves are compared sample by sample. Rows without settings are passed
    over. A curve's floor is random dropping at its own place under the same policy; with `nearest`, methods between
    layers may take the random dropping between layers nearest to theirs.

    Args:
        store: root of the run store.
        benchmarks: which, in this order.
        model: which, if the store has several.
        rule: budget rule of the rows.
        run_keys: restrict to these runs.
        nearest: see above.
        where: settings that rows must have, `key=value` each (harness/specs/comparable.py).

    Raises:
        UserError: no rows for a benchmark, several models and none chosen, rows that differ in a setting that must be
            the same, or a run without per-sample scores.
    """
    rows = [
        one
        for one in stored(store)
        if one.row["budget_rule"] == rule and (run_keys is None or one.row["run_key"] in run_keys)
    ]
    if not rows:
        raise UserError(f"store={str(store)!r} holds no finished runs with budget={rule}")
    rows = of_model(rows, model)
    present = sorted({one.row["benchmark"] for one in rows})
    panels = []
    for name in benchmarks or present:
        if name not in present:
            raise unknown_name("--benchmarks", name, present)
        ours, notes = telling([one for one in rows if one.row["benchmark"] == name])
        panels.append(panel_of(name, chosen(ours, where), nearest, notes))
    return panels


def panel_of(
    benchmark: str, rows: Sequence[Stored], nearest: bool = False, notes: Sequence[str] = ()
) -> Panel:
    """Return one benchmark's panel from rows of one model and one budget rule, all with settings, the oldest first.

    Raises:
        UserError: as `read_panels`.
    """
    most = max(one.row["n_samples"] for one in rows)
    whole = [one for one in rows if one.row["n_samples"] == most]
    newest = one_of_each(whole)
    runs = [read_run(one) for one in newest]
    if len({frozenset(run.scores) for run in runs}) > 1:
        raise UserError(f"{benchmark}: runs with {most} samples each do not share their samples")
    if any(run.units != runs[0].units for run in runs):
        raise UserError(f"{benchmark}: runs differ in which samples are one unit of statistics")
    order = sorted(runs[0].scores)
    units = [runs[0].units[key] for key in order]
    groups: dict[str, dict[float, NDArray[np.float64]]] = {}
    first = {run.name: run for run in reversed(runs)}
    for name in first:
        for ratio in sorted({run.ratio for run in runs if run.name == name}):
            same = [run for run in runs if (run.name, run.ratio) == (name, ratio)]
            # Seeds first: a sample counts once, however many seeds answered it.
            mean = np.mean([[run.scores[key] for key in order] for run in same], axis=0)
            groups.setdefault(name, {})[ratio] = by_unit(mean, units)
    plain = next((name for name, run in first.items() if run.method == FULL), None)
    unpruned = {} if plain is None else groups.pop(plain)
    full = unpruned[min(unpruned)] if unpruned else None
    floors = {
        (run.policy, run.place, run.evicts): name
        for name, run in first.items()
        if run.method in FLOORS
    }
    unread = {(run.name, run.ratio) for run in runs if run.unread}
    costs = {
        name: {ratio: _cost(runs, name, ratio) for ratio in ratios}
        for name, ratios in groups.items()
    }
    curves = [
        _curve(first[name], groups, costs[name], _floor(first[name], floors, nearest), full, unread)
        for name in sorted(groups, key=lambda name: (first[name].method in CONTROLS, name))
    ]
    return Panel(
        benchmark=benchmark,
        metric=runs[0].metric,
        n_samples=most,
        full=None if full is None else _mean(full),
        curves=_corrected(curves),
        unpruned=full,
        full_mark=mark(any(name == plain for name, _ in unread)),
        notes=(
            *notes,
            *passed_over(len(rows) - len(whole), f"with fewer than {most} samples"),
            *passed_over(len(whole) - len(newest), "of other code, a newer one has their place"),
            *_alike(runs),
            *([FOOTNOTE] if unread else []),
        ),
    )


def _alike(runs: Sequence[Run]) -> list[str]:
    """Return a line where no answer is longer than a token, behind an evicted cache and behind the whole one."""
    evicting = [run for run in runs if run.discriminates is not None]
    if not evicting or any(run.discriminates for run in evicting):
        return []
    if any(run.method == FULL and not run.single for run in runs):
        return []
    names = ", ".join(sorted({run.name for run in evicting}))
    return [
        f"{names}: every answer is one token, chosen before cache entries go; scores say nothing of them"
    ]


def _cost(runs: Iterable[Run], name: str, ratio: float) -> float:
    """Return the mean share of FLOPs of a curve's runs at one ratio."""
    return fmean(run.flops for run in runs if (run.name, run.ratio) == (name, ratio))


def _floor(
    run: Run, floors: Mapping[tuple[str, int | None, bool], str], nearest: bool
) -> str | None:
    """Return the name of the random choice that a run is compared with: at its place, under its policy."""
    ours = {
        place: name
        for (policy, place, evicts), name in floors.items()
        if policy == run.policy and evicts == run.evicts
    }
    if run.place in ours or not nearest or not run.place:
        return ours.get(run.place)
    place = run.place
    others = [other for other in ours if other]
    return ours[min(others, key=lambda other: (abs(other - place), other))] if others else None


def _curve(
    run: Run,
    groups: Mapping[str, Mapping[float, NDArray[np.float64]]],
    costs: Mapping[float, float],
    floor: str | None,
    full: NDArray[np.float64] | None,
    unread: Collection[tuple[str, float]],
) -> Curve:
    points = []
    for ratio, scores in groups[run.name].items():
        below = groups[floor].get(ratio) if floor not in (None, run.name) else None
        # At ratio 0 nothing was chosen, so there is nothing to gain.
        below = None if ratio == 0 else below
        whole = full if full is not None and full.mean() > 0 else None
        kept = None if whole is None else retained(scores, whole)
        points.append(
            Point(
                ratio=ratio,
                score=_mean(scores),
                retention=kept,
                gain=None if below is None else difference_interval(scores, below),
                pvalue=None if below is None else paired_pvalue(scores, below),
                flops=costs[ratio],
                lost=None if whole is None or ratio == 0 else paired_pvalue(scores, whole),
                scores=scores,
                unread=(run.name, ratio) in unread,
            )
        )
    floor = None if floor == run.name else floor
    return Curve(run.name, run.method in CONTROLS, floor, tuple(points), run.place)


def _corrected(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Correct the p-values of a panel, those against random dropping and those against the unpruned model apart."""
    points = [point for curve in curves for point in curve.points]
    gains = [point.pvalue for point in points if point.pvalue is not None]
    losses = [point.lost for point in points if point.lost is not None]
    chances, lost = iter(holm(gains)), iter(holm(losses))
    told = [
        replace(
            point,
            chance=None if point.pvalue is None else next(chances),
            lost=None if point.lost is None else next(lost),
        )
        for point in points
    ]
    rest = iter(told)
    return tuple(replace(curve, points=tuple(next(rest) for _ in curve.points)) for curve in curves)


def _mean(scores: Iterable[float]) -> Interval:
    return mean_interval(np.asarray(list(scores)))


def read_run(one: Stored) -> Run:
    """Return a row with its samples' contributions.

    Raises:
        UserError: the run does not have them all.
    """
    row, extra = one.row, one.row["extra"]
    metric = extra["headline"]
    found = {key: scoring for key, scoring in one.scorings().items() if metric in scoring.scores}
    # Younger than rows: how a metric comes out of its samples, and of how many.
    told = extra.get("aggregation", {}).get(metric, {})
    expected = told.get("samples") or row["n_samples"]
    if len(found) != expected:
        reason = told.get("note")
        raise UserError(
            f"run {row['run_key']} ({row['benchmark']}) has {metric} for {len(found)} of {expected} samples; "
            + (f"{metric}: {reason}" if reason else "run it again with force=true")
        )
    sites = extra.get("sites") or []
    return Run(
        name=name_of(row),
        method=row["method"],
        policy=policy(row),
        ratio=row["ratio"],
        # What goes from the cache too is not to be read beside random tokens alone.
        place=_place(sites[0]) if sites and "cache" not in extra else None,
        evicts="cache" in extra and not sites,
        metric=metric,
        flops=row["flops"]["share_of_full"],
        scores={key: scoring.scores[metric] for key, scoring in found.items()},
        units={key: (key[0], scoring.units.get(metric, key[1])) for key, scoring in found.items()},
        # Younger than rows.
        discriminates=extra.get("discriminates"),
        single=extra.get("first_token") == 1,
        unread=is_marked(row),
    )


def _place(site: Mapping[str, Any]) -> int:
    """Return the decoder layer of a site; the tower, the projector and the prefix all come before layer 0."""
    return int(site["layer"]) if site["where"] == "layer" else 0
