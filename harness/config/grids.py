"""A sweep of several grids, listed by a preset under `grids` where one product would have unwanted cells.

Each grid is a table of overrides, `ratio: 0.5,0.9`; grids run one after the other, each as a product. On the command
line `method=a,b` selects the grids' cells with these values, as do `ratio`, `keep` and `benchmark`; values that no grid
has, and any other key, replace those of every grid. With a model of conf/stand_ins.yaml, benchmarks are replaced by
their stand-ins, keys of published models are dropped, and grids that become equal run once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from espalier.harness.config.kept_tokens import REPLACES
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.settings import table

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

KEY = "grids"
#: The benchmarks that an embedded model runs in place of published ones.
STAND_INS = CONF / "stand_ins.yaml"

#: Keys by which the command line selects cells.
PICKED = ("method", *REPLACES, "benchmark")

Grid = dict[str, Any]


@dataclass(frozen=True)
class StandIns:
    """The content of the file.

    Attributes:
        models: names of the models that take stand-ins.
        keys: keys of grids that only published models have.
        benchmarks: the stand-in of each published benchmark, by its name.
    """

    models: tuple[str, ...]
    keys: tuple[str, ...]
    benchmarks: Mapping[str, str]

    def apply(self, cell: Mapping[str, Any], model: str) -> dict[str, Any]:
        """Return a cell of a grid as it runs on `model`; published models take it as it is.

        Raises:
            UserError: nothing stands for its benchmark.
        """
        if model not in self.models:
            return {**cell, "model": model}
        benchmark = cell["benchmark"]
        if benchmark not in self.benchmarks:
            raise UserError(
                f"benchmark={benchmark!r}: nothing stands for it on model={model}; valid: a line in {STAND_INS.name}"
            )
        entries = {key: value for key, value in cell.items() if key not in self.keys}
        return {**entries, "model": model, "benchmark": self.benchmarks[benchmark]}


@cache
def stand_ins() -> StandIns:
    """Return the content of the file."""
    content = read_yaml(STAND_INS)
    return StandIns(tuple(content["models"]), tuple(content["keys"]), content["benchmarks"])


def grids_of(preset: Any, overrides: Sequence[Override]) -> list[list[str]] | None:
    """Return the overrides of each grid of a preset, those of the command line among them; None where it has none.

    Args:
        preset: `grids` of a config, unresolved: a reference has another value in each cell.
        overrides: the command line's.

    Raises:
        UserError: `grids` is not a list of tables, or the benchmarks have no stand-in.
    """
    if preset is None:
        return None
    if not isinstance(preset, list) or not preset:
        raise UserError(
            f"{KEY}={preset!r} is no list of tables; valid: - {{method: ..., ratio: ...}}"
        )
    by_key = {_name(override): override for override in overrides}
    model = str(by_key["model"].value()) if "model" in by_key else None
    tables = (table(f"{KEY}.{number}", entries) for number, entries in enumerate(preset))
    grids = [grid for grid in (_on_model(entries, model) for entries in tables) if grid is not None]
    if not grids:
        raise UserError(
            f"model={model}: nothing stands for a benchmark of these {KEY}; valid: a line in conf/stand_ins.yaml"
        )
    picked_keys = set()
    for key in PICKED:
        values = _values(by_key[key]) if key in by_key else []
        if any(_selected_values(grid, key, values) for grid in grids):
            selected = (
                {**grid, key: ",".join(_selected_values(grid, key, values))} for grid in grids
            )
            grids = [grid for grid in selected if grid[key]]
            picked_keys.add(key)
    replaced = by_key.keys() - picked_keys
    replaced |= {REPLACES[key] for key in replaced & REPLACES.keys()}
    replacements = [
        str(override.input_line) for name, override in by_key.items() if name not in picked_keys
    ]
    lines = dict.fromkeys(
        tuple(_line(part, replaced)) for grid in grids for part in _by_method(grid)
    )
    return [[*line, *replacements] for line in lines]


def _by_method(grid: Grid) -> Iterator[Grid]:
    """Yield a grid for each method if it sets a `method.` key, which Hydra sets before it chooses among methods."""
    if "method" in grid and any(key.startswith("method.") for key in grid):
        yield from ({**grid, "method": method} for method in str(grid["method"]).split(","))
    else:
        yield grid


def _name(override: Override) -> str:
    return str(override.get_key_element().lstrip("+~"))


def _values(override: Override) -> list[str]:
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [str(override.value())]


def _selected_values(grid: Grid, key: str, values: Collection[str]) -> list[str]:
    """Return the values of a grid that are among `values`; numbers are compared as numbers."""
    numbers = {_number(value) for value in values}
    return [text for text in str(grid.get(key, "")).split(",") if _number(text) in numbers]


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _on_model(grid: Mapping[str, Any], model: str | None) -> Grid | None:
    """Return a grid as it runs on the command line's model; None if the model has no stand-in for its benchmarks."""
    stand_in_table = stand_ins()
    if model not in stand_in_table.models:
        return dict(grid)
    entries = {key: value for key, value in grid.items() if key not in stand_in_table.keys}
    names = str(grid.get("benchmark", "")).split(",")
    stands = ",".join(
        dict.fromkeys(
            stand_in_table.benchmarks[benchmark]
            for benchmark in names
            if benchmark in stand_in_table.benchmarks
        )
    )
    return entries | {"benchmark": stands} if stands else None


def _line(grid: Grid, replaced: Collection[str]) -> Iterable[str]:
    """Yield a grid's overrides without those that the command line replaces; a method's hyper-parameters go with it."""
    groups = {name for name in replaced if name not in ("model", "benchmark")}
    for key, value in grid.items():
        if key not in replaced and key.partition(".")[0] not in groups:
            yield f"{key}={str(value).lower() if isinstance(value, bool) else value}"
