"""The stored results of a selection, by model, budget rule and benchmark, and scores of their methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.comparison import ComparedRuns, runs_of
from espalier.harness.reports.curves.curve_points import CONTROLS, FULL, Scores
from espalier.harness.reports.curves.stored_rows import RunScores, StoredResult, with_settings
from espalier.harness.specs.commands import RUN
from espalier.harness.store.row_text import amount_text

#: A method at one amount: the name of its curve, the share removed, and the tokens kept where these were set.
MethodPoint = tuple[str, float, int | None]


@dataclass(frozen=True)
class BenchmarkRuns:
    """The comparable runs of one model on one benchmark under one budget rule."""

    model: str
    rule: str
    benchmark: str
    compared: ComparedRuns

    @property
    def metric(self) -> str:
        """The headline metric."""
        return self.compared.runs[0].metric

    @property
    def unpruned(self) -> Scores | None:
        """The unpruned model's score of each sample, None if it did not run."""
        return next((self.scores([run]) for run in self.compared.runs if run.method == FULL), None)

    @cached_property
    def points(self) -> dict[MethodPoint, list[RunScores]]:
        """The runs of each method at each amount, one for each seed."""
        points: dict[MethodPoint, list[RunScores]] = {}
        for run in self.compared.runs:
            # At ratio 0 nothing is removed.
            if run.method != FULL and run.ratio > 0:
                points.setdefault((run.name, run.ratio, run.keep), []).append(run)
        return points

    def scores(self, runs: Sequence[RunScores]) -> Scores:
        """Return the score of each sample, seeds averaged."""
        keys = self.compared.keys
        averaged: Scores = np.mean([[run.scores[key] for key in keys] for run in runs], axis=0)
        return averaged

    def result(self, run: RunScores) -> StoredResult:
        """Return the stored result of a run."""
        # By identity: the runs of two seeds are equal where nothing is drawn.
        places = zip(self.compared.runs, self.compared.results, strict=True)
        return next(result for compared_run, result in places if compared_run is run)


def grouped_runs(results: Sequence[StoredResult]) -> list[BenchmarkRuns]:
    """Return the runs of a selection, ordered by model, rule and benchmark.

    Raises:
        UserError: the runs of a benchmark differ in a setting that must be the same, or lack scores of samples.
    """
    groups: dict[tuple[str, str, str], list[StoredResult]] = {}
    for result in with_settings(results)[0]:
        row = result.row
        key = (row["model"], row["budget_rule"], row["benchmark"])
        groups.setdefault(key, []).append(result)
    return [
        BenchmarkRuns(*key, runs_of(key[2], group, swept=True))
        for key, group in sorted(groups.items())
    ]


def kept_text(point: MethodPoint) -> str:
    """Return what a method keeps at a point: a share in percent, or a number of tokens."""
    _, ratio, count = point
    return f"{100 * (1 - ratio):.4g} %" if count is None else amount_text(ratio, count)


def is_control(runs: Sequence[RunScores]) -> bool:
    """Return whether no paper proposes the method of these runs."""
    return runs[0].method in CONTROLS


def nothing_to_show(protocol: str, lacks: str, command: str) -> UserError:
    """Return the error of a protocol that a selection has no runs for."""
    return UserError(
        f"--protocol={protocol} needs {lacks} among the selected results; valid: a store of `{RUN} {command}`"
    )
