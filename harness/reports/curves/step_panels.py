"""Select the results of denoised answers to compare: by benchmark, number of steps and method, with their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_points import FULL, CurvePanel, CurvePoint
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
    newest_per_cell,
    read_results,
    results_of,
    tidy,
)


@dataclass(frozen=True)
class CostPoint:
    """A point of a curve with the mean cost of an answer.

    Attributes:
        steps: denoising steps of an answer.
        point: its ratio and score.
        flops: of decoder and head over all steps.
        ms: milliseconds.
    """

    steps: int
    point: CurvePoint
    flops: float
    ms: float


@dataclass(frozen=True)
class StepPanel:
    """One benchmark at one number of denoising steps.

    Attributes:
        steps: denoising steps of an answer.
        length: positions of an answer.
        panel: scores of all methods.
        costs: FLOPs and milliseconds of an answer by curve name and ratio; the unpruned model's under (`FULL`, 0).
    """

    steps: int
    length: int
    panel: CurvePanel
    costs: dict[tuple[str, float], tuple[float, float]]

    def points(self, curve: str, full: bool = False) -> list[CostPoint]:
        """Return the points of a curve by increasing ratio; none if it is not there.

        Args:
            curve: its name.
            full: whether the unpruned model's point comes first, if it was measured.
        """
        points = {c.name: c.points for c in self.panel.curves}.get(curve, ())
        costs = [CostPoint(self.steps, p, *self.costs[curve, p.ratio]) for p in points]
        return [*self.unpruned, *costs] if full else costs

    @property
    def unpruned(self) -> list[CostPoint]:
        """The unpruned model's point; empty if it was not measured."""
        cost = self.costs.get((FULL, 0.0))
        if self.panel.full is None or cost is None:
            return []
        return [CostPoint(self.steps, CurvePoint(0.0, self.panel.full), *cost)]


def read_step_panels(
    store: Path, model: str | None = None, where: Sequence[str] = ()
) -> dict[str, list[StepPanel]]:
    """Return the panels of each benchmark with denoised answers, by number of steps, most steps first.

    Args:
        store: root of the run store.
        model: required if the store has several.
        where: `key=value` conditions on settings.

    Raises:
        UserError: there are no results, they are of several models and `model` is None, or results differ in a setting
            that must be the same.
    """

    def is_denoised(result: StoredResult) -> bool:
        return result.row["budget_rule"] == "kept" and bool(result.row["extra"].get("diffusion"))

    results = results_of(
        read_results(store), is_denoised, "a model that denoises", store, "diffusion", model, where
    )
    frame = tidy(results, length="extra.diffusion.length", steps="extra.diffusion.steps")
    frame["length"], frame["steps"] = frame.length.map(round), frame.steps.map(round)
    panels: dict[str, list[StepPanel]] = {}
    for benchmark, group in frame.groupby("benchmark"):
        if group.length.nunique() > 1:
            lengths = ", ".join(map(str, sorted(set(group.length))))
            raise UserError(
                f"{benchmark}: answers of {lengths} positions cannot be compared; "
                "valid: one length, with --where 'benchmark.generation.max_new_tokens=...', or a store for each"
            )
        for steps in sorted(set(group.steps), reverse=True):
            members = group[group.steps == steps]
            panel = _step_panel(store, steps, members.length.iloc[0], [*members.result])
            panels.setdefault(benchmark, []).append(panel)
    return panels


def _step_panel(store: Path, steps: int, length: int, results: Sequence[StoredResult]) -> StepPanel:
    first = results[0].row
    keys = {result.row["run_key"] for result in results}
    (panel,) = read_panels(store, [first["benchmark"]], first["model"], "kept", keys)
    used = [result for result in results if result.row["n_samples"] == panel.n_samples]
    frame = tidy(newest_per_cell(used), length="extra.diffusion.length")
    costs = {
        (row.curve, row.ratio): (row.prefill_flops, row.token_ms * row.length)
        for row in frame.itertuples()
    }
    return StepPanel(steps, length, panel, costs)
