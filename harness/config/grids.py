"""A sweep of several grids, listed by a preset under `grids` where one product would have unwanted cells.

Each grid is a table of overrides, `ratio: 0.5,0.9`; grids run one after the other, each as a product. On the command
line `method=a,b` selects the grids' cells with these values, as do `ratio`, `keep` and `benchmark`; values that no grid
has, and any other key, replace those of every grid. With a model of conf/stand_ins.yaml, benchmarks are replaced by
their stand-ins, keys of published models are dropped, and grids that become equal run once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hydra.core.override_parser.types import Override

from espalier.harness.config.kept_tokens import REPLACES
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.config.overrides import key_of
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.settings import table

KEY = "grids"
#: The benchmarks that an embedded model runs in place of published ones.
STAND_INS = CONF / "stand_ins.yaml"

#: Keys by which the command line selects cells.
PICKED = ("method", *REPLACES, "benchmark")

#: A key of a command line and its value or values, separated by commas.
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

    def apply(self, grid: Mapping[str, Any], model: str | None) -> Grid | None:
        """Return a grid, or a cell of one, as it runs on `model`; None if nothing stands for its benchmarks."""
        if model not in self.models:
            return dict(grid)
        names = str(grid.get("benchmark", "")).split(",")
        stands = dict.fromkeys(self.benchmarks[name] for name in names if name in self.benchmarks)
        entries = {key: value for key, value in grid.items() if key not in self.keys}
        return {**entries, "benchmark": ",".join(stands)} if stands else None


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
    by_key = {key_of(override): override for override in overrides}
    model = str(by_key["model"].value()) if "model" in by_key else None
    tables = (table(f"{KEY}.{number}", entries) for number, entries in enumerate(preset))
    placed = (stand_ins().apply(entries, model) for entries in tables)
    grids = [grid for grid in placed if grid is not None]
    if not grids:
        raise UserError(
            f"model={model}: nothing stands for a benchmark of these {KEY}; valid: a line in conf/stand_ins.yaml"
        )
    picked_keys = set()
    for key in PICKED:
        override = by_key.get(key)
        values: Sequence[str] = ()
        if override is not None and override.is_sweep_override():
            values = [str(value) for value in override.sweep_string_iterator()]
        elif override is not None:
            values = [str(override.value())]
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
    lines: dict[tuple[str, ...], None] = {}
    for grid in grids:
        # Hydra sets a `method.` key before it chooses among methods.
        is_split = "method" in grid and any(key.startswith("method.") for key in grid)
        methods = str(grid["method"]).split(",") if is_split else []
        for part in [{**grid, "method": method} for method in methods] or [grid]:
            lines[tuple(_line(part, replaced))] = None
    return [[*line, *replacements] for line in lines]


def _selected_values(grid: Grid, key: str, values: Collection[str]) -> list[str]:
    """Return the values of a grid that are among `values`; numbers are compared as numbers."""
    numbers = {_number(value) for value in values}
    return [text for text in str(grid.get(key, "")).split(",") if _number(text) in numbers]


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _line(grid: Grid, replaced: Collection[str]) -> Iterable[str]:
    """Yield a grid's overrides without those that the command line replaces; a method's hyper-parameters go with it."""
    groups = {name for name in replaced if name not in ("model", "benchmark")}
    for key, value in grid.items():
        if key not in replaced and key.partition(".")[0] not in groups:
            yield f"{key}={str(value).lower() if isinstance(value, bool) else value}"
