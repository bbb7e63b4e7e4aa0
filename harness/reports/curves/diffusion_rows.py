"""From the rows of a store to what is compared with what: denoised answers by benchmark, number of steps and method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.curve_points import Panel, Point, read_panels
from espalier.harness.reports.curves.stored_rows import (
    Stored,
    chosen,
    no_runs,
    of_model,
    one_of_each,
    stored,
    telling,
)
from espalier.harness.specs.comparable import name


@dataclass(frozen=True)
class Spent:
    """What a row's answers cost each: FLOPs of decoder and head over all steps, and milliseconds of them."""

    flops: float
    ms: float


@dataclass(frozen=True)
class Dealt:
    """One benchmark answered in one number of steps.

    Attributes:
        steps: of an answer.
        length: its places.
        panel: scores of all methods.
        spent: by name of the curve and ratio; of the whole model under `FULL` and 0.
    """

    steps: int
    length: int
    panel: Panel
    spent: dict[tuple[str, float], Spent]


@dataclass(frozen=True)
class Spot:
    """One cell of a picture: a score, and what it cost."""

    steps: int
    ratio: float
    point: Point
    spent: Spent


def read_dealt(
    store: Path, model: str | None = None, where: Sequence[str] = ()
) -> dict[str, list[Dealt]]:
    """Return for each benchmark with denoised answers its numbers of steps, the most first.

    Args:
        store: root of the run store.
        model: which, if the store has several.
        where: settings that rows must have, `key=value` each (harness/reports/curves/stored_rows.py).

    Raises:
        UserError: there are none, or they are of several models and none was chosen, or rows differ in a setting that
            must be the same.
    """
    rows = [
        one
        for one in stored(store)
        if one.row["budget_rule"] == "kept" and one.row["extra"].get("diffusion")
    ]
    if not rows:
        raise no_runs(store, "a model that denoises", "diffusion")
    ours = chosen(telling(of_model(rows, model))[0], where)
    return {
        benchmark: [_dealt(store, rows) for rows in _by_steps(ours, benchmark)]
        for benchmark in sorted({one.row["benchmark"] for one in ours})
    }


def spots(dealt: Dealt, curve: str) -> list[Spot]:
    """Return the cells of one curve at one number of steps, by increasing ratio."""
    (found,) = [one for one in dealt.panel.curves if one.name == curve]
    return [
        Spot(dealt.steps, point.ratio, point, dealt.spent[curve, point.ratio])
        for point in found.points
    ]


def whole(dealt: Dealt) -> Spot | None:
    """Return the cell of the whole model, if it was measured."""
    spent = dealt.spent.get(("none", 0.0))
    if dealt.panel.full is None or spent is None:
        return None
    return Spot(dealt.steps, 0.0, Point(0.0, dealt.panel.full), spent)


def _by_steps(rows: Sequence[Stored], benchmark: str) -> list[list[Stored]]:
    """Return the rows of one benchmark by length and number of steps, the most steps first."""
    groups: dict[tuple[int, int], list[Stored]] = {}
    for one in rows:
        if one.row["benchmark"] == benchmark:
            told = one.row["extra"]["diffusion"]
            groups.setdefault((round(told["length"]), round(told["steps"])), []).append(one)
    if len({length for length, _ in groups}) > 1:
        lengths = ", ".join(str(length) for length in sorted({length for length, _ in groups}))
        raise UserError(
            f"{benchmark}: answers of {lengths} places cannot stand beside each other; valid: one length, with --where "
            "'benchmark.generation.max_new_tokens=...', or a store for each"
        )
    return [groups[key] for key in sorted(groups, reverse=True)]


def _dealt(store: Path, rows: Sequence[Stored]) -> Dealt:
    first = rows[0].row
    keys = {one.row["run_key"] for one in rows}
    (panel,) = read_panels(store, [first["benchmark"]], first["model"], "kept", keys)
    shown = one_of_each([one for one in rows if one.row["n_samples"] == panel.n_samples])
    told = first["extra"]["diffusion"]
    spent = {(name(one.row), one.row["ratio"]): _spent(one) for one in shown}
    return Dealt(round(told["steps"]), round(told["length"]), panel, spent)


def _spent(one: Stored) -> Spent:
    row = one.row
    length = row["extra"]["diffusion"]["length"]
    return Spent(row["flops"]["prefill_exact"], row["time"]["decode_ms_per_token"] * length)
