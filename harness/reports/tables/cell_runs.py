"""Map a printed cell to the run that fills it, from the names in the paper's file, or to the reason why none does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from espalier.harness.config.grids import stand_ins
from espalier.harness.config.group_lists import read_choice
from espalier.harness.config.method_names import method_section
from espalier.harness.config.resolvers import register
from espalier.harness.reports.tables.printed_cell import PrintedCell, place
from espalier.harness.reports.tables.published_tables import AT, FIRST, NUMBER_KEYS, Paper

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
        if run["benchmark"] not in stand_ins().benchmarks:
            return f"nothing stands for {run['benchmark']} on {model}"
        run, mismatch = stand_ins().apply(run, model), f"{model} in place of {run['model']}"
        keys.pop("metric", None)
    ordered = {**{key: run[key] for key in FIRST}, **run}
    number_path, scale = _number(keys, run["benchmark"])
    if cell.unit == "fraction" and "of" not in keys:
        scale /= 100
    return CellRun(ordered, number_path, scale, mismatch)


def _parts(part: str | Mapping[str, Any], cell: PrintedCell) -> Iterator[str | Mapping[str, Any]]:
    """Yield an entry of a paper's file, and its additions for this cell."""
    if isinstance(part, str):
        yield part
        return
    yield {key: value for key, value in part.items() if key != AT}
    for column, names in part.get(AT, {}).items():
        name = getattr(cell, column)
        if column == "benchmark" and place(cell) in names:
            name = place(cell)
        if name in names:
            yield names[name]


def _number(keys: Mapping[str, Any], benchmark: str) -> tuple[str, float]:
    if "of" in keys:
        return keys["of"], float(keys.get("scale", 1.0))
    section = choice("benchmark", benchmark)
    metric = keys.get("metric", section["headline"])
    reported = section.get("reported", {}).get(metric, {})
    usual = 100.0 if not section.get("reported") else 1.0
    return f"metrics.{metric}.value", float(keys.get("scale", reported.get("scale", usual)))


@lru_cache(maxsize=512)
def choice(group: str, name: str) -> dict[str, Any]:
    """Return a config file merged with the files that it starts from. Cost: some milliseconds, once."""
    return read_choice(group, name)


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
        resolved: Any = OmegaConf.to_container(OmegaConf.create(run).method, resolve=True)
    return resolved["name"], resolved["variant"], resolved["params"]
