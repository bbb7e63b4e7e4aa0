"""Map a printed cell to the run that fills it, from the names in the paper's file, or to the reason why none does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from espalier.harness.config.composer import Piece, resolved
from espalier.harness.config.grids import stand_ins
from espalier.harness.config.group_lists import read_choice
from espalier.harness.config.method_names import method_section
from espalier.harness.config.resolvers import register
from espalier.harness.errors import UserError
from espalier.harness.reports.tables.published_tables import (
    AT,
    FIRST,
    NUMBER_KEYS,
    Paper,
    PrintedCell,
    display_name,
    name_of,
    papers,
    place,
    read_cells,
    read_paper,
)

#: The budget rule if a paper's file names none.
RULE = "kept"


@dataclass(frozen=True)
class CellRun:
    """The run of a cell, and the place of its number in the row.

    Attributes:
        overrides: of run.py, including `FIRST`.
        number_path: dotted path of the number in the row.
        scale: factor by which tables multiply it.
        mismatch: why the number need not equal the printed one; empty if it should.
    """

    overrides: Mapping[str, Any]
    number_path: str
    scale: float
    mismatch: str = ""

    @property
    def line(self) -> tuple[str, ...]:
        """The overrides as command-line words."""
        return tuple(f"{key}={text(value)}" for key, value in self.overrides.items())


def text(value: Any) -> str:
    """Return a value as a command-line word."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_of_cell(paper: Paper, cell: PrintedCell, model: str | None = None) -> CellRun | str:
    """Return the run that fills a cell, or the reason why none does.

    Args:
        paper: its paper's file.
        cell: a printed cell.
        model: run on this model instead, with its substitute for the benchmark.
    """
    entry = paper.tables[cell.table]
    parts = (
        {"budget": RULE},
        paper.models.get(cell.model, {}),
        paper.budgets.get(cell.budget, {}),
        paper.benchmarks.get(place(cell), paper.benchmarks.get(cell.benchmark, {})),
        paper.metrics.get(cell.metric, {}),
        entry.overrides,
        {**paper.methods, **entry.methods}.get(cell.method, {}),
    )
    keys: dict[str, Any] = {}
    for part in parts:
        for addition in _parts(part, cell):
            if isinstance(addition, str):
                return addition
            keys |= addition
    keys = {key: value for key, value in keys.items() if value is not None}
    if keys.get("method") == "none":
        # Nothing is removed, so budget and method settings do not matter.
        keys = {key: value for key, value in keys.items() if not key.startswith("method.")}
        keys |= {"ratio": 0, "budget": RULE}
    run = {key: keys[key] for key in keys if key not in NUMBER_KEYS}
    missing = [key for key in FIRST if key not in run]
    if missing:
        return f"the table does not say its {missing[0]}"
    mismatch = keys.get("unlike", "")
    if model is not None and model != run["model"]:
        is_published = run["benchmark"] in stand_ins().benchmarks
        placed = stand_ins().apply(run, model) if is_published else None
        if placed is None:
            return f"nothing stands for {run['benchmark']} on {model}"
        run, mismatch = {**placed, "model": model}, f"{model} in place of {run['model']}"
        keys.pop("metric", None)
    ordered = {**{key: run[key] for key in FIRST}, **run}
    if "of" in keys:
        return CellRun(ordered, keys["of"], float(keys.get("scale", 1.0)), mismatch)
    section = choice("benchmark", run["benchmark"])
    metric, reported = keys.get("metric", section["headline"]), section.get("reported") or {}
    usual = reported.get(metric, {}).get("scale", 1.0 if reported else 100.0)
    scale = float(keys.get("scale", usual)) / (100 if cell.unit == "fraction" else 1)
    return CellRun(ordered, f"metrics.{metric}.value", scale, mismatch)


def _parts(part: str | Mapping[str, Any], cell: PrintedCell) -> Iterator[str | Mapping[str, Any]]:
    """Yield an entry of a paper's file, and its additions for this cell."""
    if isinstance(part, str):
        yield part
        return
    yield {key: value for key, value in part.items() if key != AT}
    for column, names in part.get(AT, {}).items():
        is_place = column == "benchmark" and place(cell) in names
        name = place(cell) if is_place else getattr(cell, column)
        if name in names:
            yield names[name]


#: A config file merged with the files that it starts from. Cost: some milliseconds, once.
choice = lru_cache(maxsize=512)(read_choice)


def method_of(run: CellRun) -> tuple[str, str, Mapping[str, Any]]:
    """Return the method, the variant and the hyper-parameters of a run's row."""
    params = {
        key.removeprefix("method.params."): value
        for key, value in run.overrides.items()
        if key.startswith("method.params.")
    }
    section = choice("benchmark", run.overrides["benchmark"])
    return _method(
        run.overrides["method"],
        run.overrides.get("method.variant"),
        float(run.overrides["ratio"]),
        run.overrides["budget"],
        section.get("kind", "understanding"),
        choice("model", run.overrides["model"])["adapter"],
        tuple(params.items()),
    )


@lru_cache(maxsize=8192)
def _method(
    name: str,
    variant: str | None,
    ratio: float,
    rule: str,
    kind: str,
    adapter: str,
    params: tuple[tuple[str, Any], ...],
) -> tuple[str, str, Mapping[str, Any]]:
    register()
    part = method_section(name)
    part["variant"] = variant or part["variant"]
    part["params"] = {**part.get("params", {}), **dict(params)}
    run = {
        "ratio": ratio,
        "budget": {"rule": rule},
        "method": part,
        "benchmark": {"kind": kind, "name": kind},
        "model": {"adapter": adapter},
    }
    # A real run prints the hyper-parameters that depend on the kind of task; discard the lines here.
    with contextlib.redirect_stderr(io.StringIO()):
        method = resolved({key: Piece(value) for key, value in run.items()}, ["method"])["method"]
    return method["name"], method["variant"], method["params"]


#: Keys of a grid with lists as values.
LISTED = ("method", "ratio", "benchmark")

Grid = dict[str, Any]


def is_table(name: str) -> bool:
    """Return whether a name is made of a paper's and a table's: `d2pruner_table1`, `d2pruner_fig4`."""
    slug, _, number = name.rpartition("_")
    return number.startswith(("table", "fig")) and slug in papers()


def preset(name: str) -> dict[str, Any]:
    """Return the preset of a table, as a file of conf/experiment has it.

    Raises:
        UserError: the paper has no such table, or no run fills a cell of it.
    """
    slug, _, number = name.rpartition("_")
    paper, number = read_paper(slug), number.removeprefix("table")
    paper.table(number)
    joined = grids(runs_of(paper, number))
    if not joined:
        valid = ", ".join(name for name in titles() if name.startswith(f"{slug}_"))
        raise UserError(f"experiment={name!r}: no run fills a cell of it; valid: {valid}")
    runs = [run_of_cell(paper, cell) for cell in read_cells(paper, number)]
    # Accuracy is read from the rows, unless a cell is a time, a count or a size.
    costs = any(
        isinstance(run, CellRun) and not run.number_path.startswith("metrics.") for run in runs
    )
    engine = {} if costs else {"engine": {"paired": 0}}
    lists = [{k: ",".join(v) if k in LISTED else v for k, v in grid.items()} for grid in joined]
    return {"refused": "skip", **engine, "hydra": {"mode": "MULTIRUN"}, "grids": lists}


def titles() -> dict[str, str]:
    """Return the content of each table with a preset, by the preset's name. Cost: reads all of results/papers."""
    return {
        name_of(
            slug, number
        ): f"{paper.paper} (arXiv {paper.arxiv}), {display_name(number)}: {entry.title}"
        for slug in papers()
        for paper in (read_paper(slug),)
        for number, entry in paper.tables.items()
        if runs_of(paper, number)
    }


def runs_of(paper: Paper, number: str) -> list[Mapping[str, Any]]:
    """Return the runs that a table's cells need, each once, in printed order."""
    runs: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for cell in read_cells(paper, number):
        run = run_of_cell(paper, cell)
        if isinstance(run, CellRun):
            runs.setdefault(run.line, run.overrides)
    return list(runs.values())


def grids(runs: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Return grids that expand to these runs: benchmarks, methods, ratios joined where all else is equal."""
    merged: list[Grid] = [{**run, **{key: (text(run[key]),) for key in LISTED}} for run in runs]
    for key in ("benchmark", "method", "ratio"):
        joined: dict[tuple[Any, ...], Grid] = {}
        for grid in merged:
            remainder = tuple(sorted((k, str(v)) for k, v in grid.items() if k != key))
            if remainder in joined:
                joined[remainder][key] += grid[key]
            else:
                joined[remainder] = dict(grid)
        merged = list(joined.values())
    return merged
