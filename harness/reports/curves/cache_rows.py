"""From the rows of a store to what is compared with what: compressors, settings of one of them, two methods at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.harness.reports.curves.curve_points import FULL, read_run
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
from espalier.harness.stats import Interval, mean_interval
from espalier.harness.store.unparsed_mark import is_marked, mark

#: The compressor whose windows and budgets are studied.
COMPARED = "aircache"
#: Between the names of two methods on one prompt.
PLUS = "+"


@dataclass(frozen=True)
class Cell(Stored):
    """One row of a compressor, of two methods on one prompt, or of a part of these alone."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Hyper-parameters."""
        found: Mapping[str, Any] = self.row["extra"]["params"]
        return found

    @property
    def evicted(self) -> float:
        """Share of the cache entries that was to go."""
        return float((self.row["extra"].get("cache") or {}).get("ratio", 0.0))

    @cached_property
    def score(self) -> Interval:
        """Mean of the headline over samples."""
        return mean_interval(list(read_run(self).scores.values()))

    @property
    def percent(self) -> str:
        """The score with its interval, in percent."""
        return self.score.percent + mark(is_marked(self.row))


def chosen_cells(store: Path, model: str | None = None, where: Sequence[str] = ()) -> list[Cell]:
    """Return the newest row of each cell that evicts cache entries, and the rows of reducers and of the whole model.

    Args:
        store: root of the run store.
        model: which, if the store has several.
        where: settings that rows must have, `key=value` each (harness/reports/curves/stored_rows.py).

    Raises:
        UserError: there is none that evicts, they are of several models and none was chosen, or rows differ in a
            setting that must be the same.
    """
    rows = [one for one in stored(store) if one.row["budget_rule"] == "kept"]
    benchmarks = {_place(one) for one in rows if "cache" in one.row["extra"]}
    if not benchmarks:
        raise no_runs(store, "a cache compressor", "kv")
    beside = [
        one for one in rows if _place(one) in benchmarks and not one.row["extra"].get("speculative")
    ]
    cells = [Cell(one.path, one.row, one.told) for one in telling(of_model(beside, model))[0]]
    return one_of_each(chosen(cells, where))


def shown(cells: Sequence[Cell], files: Collection[str]) -> list[Cell]:
    """Return the rows of compressors as config files have them, and of the whole model, where random entries are.

    Args:
        cells: rows.
        files: names of the curves that have a config file.
    """
    floors = {_place(cell) for cell in cells if cell.row["method"] == "random_kv"}
    return [
        cell
        for cell in cells
        if _place(cell) in floors
        and (cell.row["method"] == FULL or (_alone(cell) and name(cell.row) in files))
    ]


def ablated(cells: Sequence[Cell]) -> list[Cell]:
    """Return the rows that study one compressor: all windows and budgets of a benchmark and ratio with several."""
    ours = [cell for cell in cells if cell.row["method"] == COMPARED and _alone(cell)]
    several = {
        (*_place(cell), cell.row["ratio"]) for cell in ours if cell.row["extra"].get("label")
    }
    return [cell for cell in ours if (*_place(cell), cell.row["ratio"]) in several]


def stacks(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Return for each benchmark with two methods on one prompt: the whole model, the parts alone, both.

    A compressor behind `none` stands for itself alone, as a row of the same sweep.
    """
    found: dict[str, list[Cell]] = {}
    for place in sorted({_place(cell) for cell in cells if PLUS in cell.row["method"]}):
        ours = [cell for cell in cells if _place(cell) == place]
        both = [cell for cell in ours if PLUS in cell.row["method"]]
        both.sort(key=lambda cell: _first(cell) != FULL)
        named = {cell.row["method"].partition(PLUS)[2] for cell in both if _first(cell) == FULL}
        parts = [
            cell
            for cell in ours
            if PLUS not in cell.row["method"]
            and cell.row["method"] not in named
            and any(_part(cell, one) for one in both)
        ]
        whole = [cell for cell in ours if cell.row["method"] == FULL]
        found[place[1]] = [*whole[:1], *sorted(parts, key=_alone), *both]
    return found


def _first(cell: Cell) -> str:
    return str(cell.row["method"]).partition(PLUS)[0]


def _alone(cell: Cell) -> bool:
    return "cache" in cell.row["extra"] and PLUS not in cell.row["method"]


def _part(cell: Cell, both: Cell) -> bool:
    """Say whether a row is of one of two methods, at the ratio that it has beside the other."""
    first, _, second = both.row["method"].partition(PLUS)
    if _alone(cell):
        return bool(name(cell.row) == second and cell.row["ratio"] == both.evicted)
    return bool(cell.row["method"] == first != FULL and cell.row["ratio"] == both.row["ratio"])


def _place(one: Stored) -> tuple[str, str, int]:
    return one.row["model"], one.row["benchmark"], one.row["n_samples"]
