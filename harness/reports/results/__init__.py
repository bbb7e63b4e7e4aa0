"""Stored results as tidy pandas tables: `from harness import results; results.load()`.

    rows = results.load("results/demo")        # one line for each cell and metric
    scores = results.samples("results/demo")   # one for each run, sample and metric
    points = results.compare("results/demo")   # one for each point of a curve, with intervals and tests

A path is a run store or a folder of tables (harness/store/parquet_tables.py); relative ones start at the repository.
Columns
and units are in harness/reports/results/result_columns.py and docs/rows.md. What is passed over is named on stderr.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from espalier.harness.errors import UserError, tell_once
from espalier.harness.paths import ROOT
from espalier.harness.reports.results.result_columns import BLOCKS, POINTS, ROWS, SAMPLES
from espalier.harness.specs.comparable import identity, passed_over
from espalier.harness.store import Store
from espalier.harness.store.files.digests import digest
from espalier.harness.store.files.folder_checks import existing_store
from espalier.harness.store.parquet_tables import is_table, read_rows, read_samples
from espalier.harness.store.row_blocks import remembered
from espalier.harness.store.row_reader import walk

#: Where rows are unless one says otherwise: those of run.py.
DEFAULT = "results"

if TYPE_CHECKING:
    # Brings in torch and scipy, seconds and half a gigabyte that rows alone need not wait for.
    from espalier.harness.reports.curves.curve_points import CurvePoint
    from espalier.harness.stats import Interval

Row = Mapping[str, Any]


def load(path: str | Path = DEFAULT) -> pd.DataFrame:
    """Return one line for each cell and metric, columns and types as `ROWS` of result_columns.py.

    Rows without settings, of earlier versions, are passed over; of several rows of one cell under equal settings, which
    are of different code, the newest counts. Both are named on stderr, and so are damaged rows, runs that are not
    finished, and rows of several commits.

    Raises:
        UserError: there are no rows, or a table is damaged, of another version or has a run twice.

    Cost: one row is in memory at a time, beside the lines.
    """
    folder = _folder(path)
    lines: dict[tuple[Any, ...], tuple[float, list[tuple[Any, ...]]]] = {}
    older = twice = 0
    digested = remembered(digest)
    for committed, row in _rows(folder):
        if "settings" not in row:
            older += 1
            continue
        cell = (*identity(row), digested(row["settings"]))
        twice += cell in lines
        if cell not in lines or committed >= lines[cell][0]:
            lines[cell] = (committed, list(_lines(row)))
    if not lines:
        raise UserError(
            f"results.load: {str(folder)!r} holds no rows; valid: a run store, results/demo"
        )
    found = [line for _, several in lines.values() for line in several]
    place = list(ROWS).index("commit")
    commits = Counter(line[place] for line in found)
    _tell(folder, passed_over(older, "without settings, from an older version"))
    _tell(folder, passed_over(twice, "of other code, a newer one has their place"))
    if len(commits) > 1:
        named = ", ".join(str(commit) for commit, _ in commits.most_common(4))
        _tell(folder, [f"rows of {len(commits)} commits: {named}"])
    columns = zip(*found, strict=True)
    return pd.DataFrame(
        {
            name: pd.array(list(values), dtype=ROWS[name].dtype)
            for name, values in zip(ROWS, columns, strict=True)
        }
    )


def samples(path: str | Path = DEFAULT) -> pd.DataFrame:
    """Return one line for each run, sample and metric, columns and types as `SAMPLES` of result_columns.py.

    Raises:
        UserError: there are no rows, or a table is damaged.
    """
    # It brings in torch.
    from espalier.harness.evaluation.samples import read_scorings

    folder, types = _folder(path), {name: dtype for name, (dtype, _) in SAMPLES.items()}
    if is_table(folder):
        return read_samples(folder).to_pandas().astype(types)
    lines = [
        (run.path.name, *key, metric, score, one.units.get(metric, key[1]))
        for run, _ in Store(folder).each()
        for key, one in read_scorings(run.journal.entries()).items()
        for metric, score in one.scores.items()
    ]
    if not lines:
        raise UserError(f"results.samples: {str(folder)!r} holds no scores; valid: results/demo")
    return pd.DataFrame(lines, columns=list(types)).astype(types)


def compare(
    path: str | Path = DEFAULT,
    benchmarks: Sequence[str] = (),
    model: str | None = None,
    rule: str = "kept",
    where: Sequence[str] = (),
) -> pd.DataFrame:
    """Return one line for each point of each curve, columns and types as `POINTS` of result_columns.py.

    The unpruned model is a line of its own, `none` at ratio 0. What may stand beside what is checked as for reports.

    Args:
        path: as for `load`.
        benchmarks: which; all if empty.
        model: which, if there are several.
        rule: budget rule of the rows.
        where: settings that rows must have, `key=value` each.

    Raises:
        UserError: as `espalier.harness.reports.curves.curve_points.read_panels`.
    """
    # It brings in torch and scipy.
    from espalier.harness.reports.curves.curve_points import CurvePoint, read_panels

    lines: list[dict[str, Any]] = []
    for panel in read_panels(_folder(path), benchmarks, model, rule, where=where):
        told = {"benchmark": panel.benchmark, "metric": panel.metric, "n_samples": panel.n_samples}
        if panel.full is not None:
            whole = CurvePoint(0.0, panel.full, flops=1.0)
            lines.append({**told, "curve": "none", "control": True, **_point(whole)})
        for curve in panel.curves:
            ours = {**told, "curve": curve.name, "control": curve.control, "floor": curve.floor}
            lines += [{**ours, **_point(point)} for point in curve.points]
        _tell(_folder(path), [f"{panel.benchmark}: {note}" for note in panel.notes])
    return _frame(lines, {name: dtype for name, (dtype, _) in POINTS.items()})


def _folder(path: str | Path) -> Path:
    found = Path(path).expanduser()
    return existing_store(found if found.is_absolute() else ROOT / found, "path")


def _rows(folder: Path) -> Iterator[tuple[float, Row]]:
    """Yield rows with a number that grows with their age of commit."""
    if is_table(folder):
        yield from enumerate(read_rows(folder))
        return
    left = 0
    for run in walk(folder, BLOCKS):
        if run.row is not None:
            yield run.committed, run.row
            continue
        left += 1
        if run.problem is not None:
            tell_once(f"passed over: {run.problem}")
    _tell(folder, passed_over(left, "not finished, or damaged"))


def _lines(row: Row) -> Iterator[tuple[Any, ...]]:
    """Yield a line for each metric, in the order of `ROWS`; texts that rows share are held once."""
    shared = {name: column.read(row) for name, column in ROWS.items() if column.read is not None}
    how = row["extra"].get("aggregation", {})
    for metric, told in row["metrics"].items():
        line = {
            **shared,
            "metric": metric,
            "headline": metric == row["extra"].get("headline"),
            "value": told.get("value"),
            "stderr": told.get("stderr"),
            "aggregation": how.get(metric, {}).get("how"),
        }
        yield tuple(
            sys.intern(value) if isinstance(value, str) else value
            for value in (line[name] for name in ROWS)
        )


def _point(point: CurvePoint) -> dict[str, Any]:
    return {
        **{"ratio": point.ratio, "flops_share": point.flops},
        **_ends("score", point.score),
        **_ends("retention", point.retention),
        **_ends("gain", point.gain),
        **{
            "lost_p": point.loss_pvalue,
            "gain_p": point.pvalue,
            "gain_p_holm": point.corrected_pvalue,
        },
    }


def _ends(name: str, interval: Interval | None) -> dict[str, float]:
    if interval is None:
        return {}
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _frame(lines: Sequence[Mapping[str, Any]], types: Mapping[str, str]) -> pd.DataFrame:
    columns = {name: [line.get(name) for line in lines] for name in types}
    return pd.DataFrame(
        {name: pd.array(values, dtype=types[name]) for name, values in columns.items()}
    )


def _tell(folder: Path, notes: Sequence[str]) -> None:
    for note in notes:
        tell_once(f"{folder}: {note}")
