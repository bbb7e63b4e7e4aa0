"""Stored results as tidy pandas tables: `from espalier import results; results.load()`.

    rows = results.load("results/demo")        # a line for each cell and metric
    scores = results.samples("results/demo")   # a line for each run, sample and metric
    points = results.compare("results/demo")   # a line for each point of a curve, with intervals and tests
    points.to_latex("table.tex")               # as the table of a paper
    points.plot("curves.pdf")                  # as the figure of a report

A path is a run store or a folder of tables (harness/store/exports.py), relative to the repository or absolute.
Columns and units are in harness/reports/frame.py and docs/rows.md. Skipped results are reported on
stderr.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd

from espalier.harness.errors import UserError, tell_once
from espalier.harness.paths import DEFAULT_STORE, DEMO, located, short_path
from espalier.harness.reports.curves.point_frame import PointFrame
from espalier.harness.reports.frame import (
    BLOCKS,
    ROWS,
    SAMPLES,
    metric_lines,
    report_damaged,
    stored_results,
    typed,
)
from espalier.harness.specs.comparable import identity, passed_over, settings_digest
from espalier.harness.store.files.folder_checks import existing_store
from espalier.harness.store.index import ReadRun, memoized


def load(path: str | Path = DEFAULT_STORE) -> pd.DataFrame:
    """Return a line for each cell and metric; columns and types as in `ROWS` of frame.py.

    Rows without settings (of older versions) are skipped; if several rows of a cell differ only in code version, the
    newest is used. Both are reported on stderr, as are damaged rows, unfinished runs, and rows of several commits.

    Raises:
        UserError: there are no rows, or a table is damaged, of another version or has a run twice.

    Cost: one row is in memory at a time, besides the lines.
    """
    folder = _folder(path)
    lines: dict[tuple[Any, ...], tuple[float, list[tuple[Any, ...]]]] = {}
    older = superseded = 0
    digested = memoized(settings_digest)
    skipped: list[ReadRun] = []
    for result in stored_results(folder, BLOCKS, skipped.append, scored=False):
        row = result.row
        if "settings" not in row:
            older += 1
            continue
        cell = (*identity(row), digested(row["settings"]))
        superseded += cell in lines
        if cell not in lines or result.committed >= lines[cell][0]:
            lines[cell] = (result.committed, list(metric_lines(row)))
    for run in skipped:
        report_damaged(run)
    _print_notes(folder, passed_over(len(skipped), "not finished, or damaged"))
    if not lines:
        raise UserError(
            f"results.load: {str(folder)!r} holds no rows; valid: a run store, {short_path(DEMO)}"
        )
    all_lines = [line for _, cell_lines in lines.values() for line in cell_lines]
    columns = dict(zip(ROWS, zip(*all_lines, strict=True), strict=True))
    commits = Counter(columns["commit"])
    _print_notes(folder, passed_over(older, "without settings, from an older version"))
    _print_notes(folder, passed_over(superseded, "of other code, a newer one has their place"))
    if len(commits) > 1:
        names = ", ".join(str(commit) for commit, _ in commits.most_common(4))
        _print_notes(folder, [f"rows of {len(commits)} commits: {names}"])
    return typed(columns, ROWS)


def samples(path: str | Path = DEFAULT_STORE) -> pd.DataFrame:
    """Return a line for each run, sample and metric; columns and types as in `SAMPLES` of frame.py.

    Raises:
        UserError: there are no rows, or a table is damaged.
    """
    folder, types = _folder(path), {name: dtype for name, (dtype, _) in SAMPLES.items()}
    lines = [
        (result.path.name, *key, metric, score, scoring.units.get(metric, key[1]))
        for result in stored_results(folder, (), report_damaged)
        for key, scoring in result.scorings().items()
        for metric, score in scoring.scores.items()
    ]
    if not lines:
        raise UserError(
            f"results.samples: {str(folder)!r} holds no scores; valid: {short_path(DEMO)}"
        )
    return pd.DataFrame(lines, columns=list(types)).astype(types)


def compare(
    path: str | Path = DEFAULT_STORE,
    benchmarks: Sequence[str] = (),
    model: str | None = None,
    rule: str = "kept",
    where: Sequence[str] = (),
) -> PointFrame:
    """Return a line for each point of each curve; columns and types as in `POINTS` of frame.py.

    The unpruned model has its own line, `none` at ratio 0. Results are checked for comparability as in reports.

    Args:
        path: as for `load`.
        benchmarks: names; all if empty.
        model: required if there are several.
        rule: budget rule of the rows.
        where: `key=value` conditions on settings.

    Raises:
        UserError: as `espalier.harness.reports.curves.comparison.read_panels`.
    """
    # Imports torch and scipy.
    from espalier.harness.reports.curves.comparison import points_of, read_panels

    folder = _folder(path)
    panels = read_panels(folder, benchmarks, model, rule, where=where, swept=True)
    for panel in panels:
        _print_notes(folder, [f"{panel.benchmark}: {note}" for note in panel.notes])
    return points_of(panels)


def _folder(path: str | Path) -> Path:
    if not isinstance(path, str | PathLike):
        raise UserError(
            f"path={type(path).__name__} must be the path of a run store; `where` chooses rows"
        )
    return existing_store(located(path), "path")


def _print_notes(folder: Path, notes: Sequence[str]) -> None:
    for note in notes:
        tell_once(f"{folder}: {note}")
