"""Select the results of denoised answers to compare: by benchmark, number of steps and method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.curve_points import CurvePanel, CurvePoint, read_panels
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
    filter_results,
    newest_per_cell,
    no_runs_error,
    read_results,
    select_model,
    with_settings,
)
from espalier.harness.specs.comparable import name


@dataclass(frozen=True)
class AnswerCost:
    """The mean cost of an answer: FLOPs of decoder and head over all steps, and milliseconds."""

    flops: float
    ms: float


@dataclass(frozen=True)
class StepPanel:
    """One benchmark at one number of denoising steps.

    Attributes:
        steps: denoising steps of an answer.
        length: positions of an answer.
        panel: scores of all methods.
        costs: by curve name and ratio; the unpruned model's under (`FULL`, 0).
    """

    steps: int
    length: int
    panel: CurvePanel
    costs: dict[tuple[str, float], AnswerCost]


@dataclass(frozen=True)
class CostPoint:
    """A point of a curve with its cost."""

    steps: int
    ratio: float
    point: CurvePoint
    cost: AnswerCost


def read_step_panels(
    store: Path, model: str | None = None, where: Sequence[str] = ()
) -> dict[str, list[StepPanel]]:
    """Return the panels of each benchmark with denoised answers, by number of steps, most steps first.

    Args:
        store: root of the run store.
        model: required if the store has several.
        where: `key=value` conditions on settings (harness/reports/curves/stored_rows.py).

    Raises:
        UserError: there are no results, they are of several models and `model` is None, or results differ in a setting
            that must be the same.
    """
    results = [
        result
        for result in read_results(store)
        if result.row["budget_rule"] == "kept" and result.row["extra"].get("diffusion")
    ]
    if not results:
        raise no_runs_error(store, "a model that denoises", "diffusion")
    selected = filter_results(with_settings(select_model(results, model))[0], where)
    return {
        benchmark: [_step_panel(store, results) for results in _by_steps(selected, benchmark)]
        for benchmark in sorted({result.row["benchmark"] for result in selected})
    }


def cost_points(step_panel: StepPanel, curve: str) -> list[CostPoint]:
    """Return the points of one curve with their costs, by increasing ratio."""
    (curve_data,) = [candidate for candidate in step_panel.panel.curves if candidate.name == curve]
    return [
        CostPoint(step_panel.steps, point.ratio, point, step_panel.costs[curve, point.ratio])
        for point in curve_data.points
    ]


def unpruned_point(step_panel: StepPanel) -> CostPoint | None:
    """Return the unpruned model's point with its cost, if it was measured."""
    cost = step_panel.costs.get(("none", 0.0))
    if step_panel.panel.full is None or cost is None:
        return None
    return CostPoint(step_panel.steps, 0.0, CurvePoint(0.0, step_panel.panel.full), cost)


def _by_steps(results: Sequence[StoredResult], benchmark: str) -> list[list[StoredResult]]:
    """Return the results of one benchmark grouped by length and number of steps, most steps first."""
    groups: dict[tuple[int, int], list[StoredResult]] = {}
    for result in results:
        if result.row["benchmark"] == benchmark:
            block = result.row["extra"]["diffusion"]
            groups.setdefault((round(block["length"]), round(block["steps"])), []).append(result)
    if len({length for length, _ in groups}) > 1:
        lengths = ", ".join(str(length) for length in sorted({length for length, _ in groups}))
        raise UserError(
            f"{benchmark}: answers of {lengths} positions cannot be compared; valid: one length, with --where "
            "'benchmark.generation.max_new_tokens=...', or a store for each"
        )
    return [groups[key] for key in sorted(groups, reverse=True)]


def _step_panel(store: Path, results: Sequence[StoredResult]) -> StepPanel:
    first = results[0].row
    keys = {result.row["run_key"] for result in results}
    (panel,) = read_panels(store, [first["benchmark"]], first["model"], "kept", keys)
    used = newest_per_cell(
        [result for result in results if result.row["n_samples"] == panel.n_samples]
    )
    block = first["extra"]["diffusion"]
    costs = {(name(result.row), result.row["ratio"]): _answer_cost(result) for result in used}
    return StepPanel(round(block["steps"]), round(block["length"]), panel, costs)


def _answer_cost(result: StoredResult) -> AnswerCost:
    row = result.row
    length = row["extra"]["diffusion"]["length"]
    return AnswerCost(row["flops"]["prefill_exact"], row["time"]["decode_ms_per_token"] * length)
