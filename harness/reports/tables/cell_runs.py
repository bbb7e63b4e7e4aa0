"""Which run fills a printed cell: the names of a paper's file put together to one command line, or why none does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from espalier.harness.config.group_lists import read_choice
from espalier.harness.config.method_lists import register
from espalier.harness.config.method_names import method_section
from espalier.harness.config.stand_ins import stand_ins
from espalier.harness.reports.tables.printed_cell import Cell, place
from espalier.harness.reports.tables.published_tables import AT, FIRST, MEASURE, Paper

#: The budget rule where a paper's file names none.
RULE = "kept"


@dataclass(frozen=True)
class Wanted:
    """The run that a cell asks for, and the number of its row.

    Attributes:
        overrides: of run.py, `FIRST` among them.
        of: dotted path of the number in the row.
        scale: by what tables multiply it.
        unlike: why it need not be the printed number; empty where it is meant to be.
    """

    overrides: Mapping[str, Any]
    of: str
    scale: float
    unlike: str = ""

    @property
    def line(self) -> tuple[str, ...]:
        """The overrides as a command line has them."""
        return tuple(f"{key}={text(value)}" for key, value in self.overrides.items())


def text(value: Any) -> str:
    """Return a value as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def wanted(paper: Paper, cell: Cell, model: str | None = None) -> Wanted | str:
    """Return what fills a cell, or why nothing does.

    Args:
        paper: its paper's file.
        cell: a printed one.
        model: run on this model in place of the cell's, with what stands for the benchmark.
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
    found: dict[str, Any] = {}
    for part in parts:
        for own in _parts(part, cell):
            if isinstance(own, str):
                return own
            found |= own
    found = {key: value for key, value in found.items() if value is not None}
    if found.get("method") == "none":
        # Nothing is dropped, so that nothing of a budget or a method counts.
        found = {key: value for key, value in found.items() if not key.startswith("method.")}
        found |= {"ratio": 0, "budget": RULE}
    run = {key: found[key] for key in found if key not in MEASURE}
    missing = [key for key in FIRST if key not in run]
    if missing:
        return f"the table does not say its {missing[0]}"
    unlike = found.get("unlike", "")
    if model is not None and model != run["model"]:
        if run["benchmark"] not in stand_ins().benchmarks:
            return f"nothing stands for {run['benchmark']} on {model}"
        run, unlike = stand_ins().apply(run, model), f"{model} in place of {run['model']}"
        found.pop("metric", None)
    ordered = {**{key: run[key] for key in FIRST}, **run}
    of, scale = _number(found, run["benchmark"])
    if cell.unit == "fraction" and "of" not in found:
        scale /= 100
    return Wanted(ordered, of, scale, unlike)


def _parts(part: str | Mapping[str, Any], cell: Cell) -> Iterator[str | Mapping[str, Any]]:
    """Yield an entry of a paper's file, and what it adds for this cell."""
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


def _number(found: Mapping[str, Any], benchmark: str) -> tuple[str, float]:
    if "of" in found:
        return found["of"], float(found.get("scale", 1.0))
    section = choice("benchmark", benchmark)
    metric = found.get("metric", section["headline"])
    reported = section.get("reported", {}).get(metric, {})
    usual = 100.0 if not section.get("reported") else 1.0
    return f"metrics.{metric}.value", float(found.get("scale", reported.get("scale", usual)))


@lru_cache(maxsize=512)
def choice(group: str, name: str) -> dict[str, Any]:
    """Return a file of conf, on top of those that it starts from. Cost: some milliseconds, once."""
    return read_choice(group, name)


def method_of(run: Wanted) -> tuple[str, str, Mapping[str, Any]]:
    """Return the method, the variant and the hyper-parameters that a run's row has."""
    own = {
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
        tuple(own.items()),
    )


@lru_cache(maxsize=8192)
def _method(
    name: str,
    variant: str | None,
    ratio: float,
    rule: str,
    kind: str,
    adapter: str,
    own: tuple[tuple[str, Any], ...],
) -> tuple[str, str, Mapping[str, Any]]:
    register()
    part = method_section(name)
    part["variant"] = variant or part["variant"]
    part["params"] = {**part.get("params", {}), **dict(own)}
    run = {
        "ratio": ratio,
        "budget": {"rule": rule},
        "method": part,
        "benchmark": {"kind": kind, "name": kind},
        "model": {"adapter": adapter},
    }
    # What a hyper-parameter is by the kind of task is told by the run.
    with contextlib.redirect_stderr(io.StringIO()):
        resolved: Any = OmegaConf.to_container(OmegaConf.create(run).method, resolve=True)
    return resolved["name"], resolved["variant"], resolved["params"]
