"""A sweep of several grids, which a preset lists under `grids` where one product would have cells that nobody asks for.

Each grid is a table of overrides, `ratio: 0.5,0.9`, whose product is run, one grid after the other. On the command line
`method=a,b` picks out of the grids what they have of it, likewise `ratio` and `benchmark`; values that no grid has, and
any other key, replace those of every grid. With a model of conf/stand_ins.yaml benchmarks become those that stand for
them, keys of published models alone are left out, and grids that become equal run once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from espalier.harness.config.stand_ins import stand_ins
from espalier.harness.errors import UserError
from espalier.harness.settings import table

KEY = "grids"

#: Keys of which the command line picks.
PICKED = ("method", "ratio", "benchmark")

Grid = dict[str, Any]


def grids_of(config: DictConfig, overrides: Sequence[Override]) -> list[list[str]] | None:
    """Return the overrides of each grid of a preset, those of the command line among them; None where it has none.

    Args:
        config: the preset, composed with the overrides that are no sweeps.
        overrides: the command line's.

    Raises:
        UserError: `grids` is no list of tables, or nothing stands for a benchmark.
    """
    found = config.get(KEY)
    if found is None:
        return None
    # As it is written: what a value refers to is another one in each cell.
    raw = OmegaConf.to_container(found, resolve=False) if OmegaConf.is_config(found) else found
    if not isinstance(raw, list) or not raw:
        raise UserError(f"{KEY}={raw!r} is no list of tables; valid: - {{method: ..., ratio: ...}}")
    given = {_name(one): one for one in overrides}
    model = str(given["model"].value()) if "model" in given else None
    tables = (table(f"{KEY}.{number}", one) for number, one in enumerate(raw))
    grids = [grid for grid in (_on(entries, model) for entries in tables) if grid is not None]
    if not grids:
        raise UserError(
            f"model={model}: nothing stands for a benchmark of these {KEY}; valid: a line in conf/stand_ins.yaml"
        )
    picked = set()
    for key in PICKED:
        values = _values(given[key]) if key in given else []
        if any(_of(grid, key, values) for grid in grids):
            chosen = ({**grid, key: ",".join(_of(grid, key, values))} for grid in grids)
            grids = [grid for grid in chosen if grid[key]]
            picked.add(key)
    replaced = given.keys() - picked
    rest = [str(one.input_line) for name, one in given.items() if name in replaced]
    lines = dict.fromkeys(tuple(_line(one, replaced)) for grid in grids for one in _apart(grid))
    return [[*line, *rest] for line in lines]


def _apart(grid: Grid) -> Iterator[Grid]:
    """Yield a grid for each method if it sets something of methods: Hydra sets that before it takes one of several."""
    if "method" in grid and any(key.startswith("method.") for key in grid):
        yield from ({**grid, "method": method} for method in str(grid["method"]).split(","))
    else:
        yield grid


def _name(override: Override) -> str:
    return str(override.get_key_element().lstrip("+~"))


def _values(override: Override) -> list[str]:
    if override.is_sweep_override():
        return [str(one) for one in override.sweep_string_iterator()]
    return [str(override.value())]


def _of(grid: Grid, key: str, values: Collection[str]) -> list[str]:
    """Return those of a grid's values that are asked for."""
    asked = {_number(value) for value in values}
    return [one for one in str(grid.get(key, "")).split(",") if _number(one) in asked]


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _on(grid: Mapping[str, Any], model: str | None) -> Grid | None:
    """Return a grid as it runs on the command line's model; None where nothing stands for its benchmarks."""
    known = stand_ins()
    if model not in known.models:
        return dict(grid)
    kept = {key: value for key, value in grid.items() if key not in known.keys}
    names = str(grid.get("benchmark", "")).split(",")
    stands = ",".join(
        dict.fromkeys(known.benchmarks[one] for one in names if one in known.benchmarks)
    )
    return kept | {"benchmark": stands} if stands else None


def _line(grid: Grid, replaced: Collection[str]) -> Iterable[str]:
    """Yield a grid's overrides, less those that the command line replaces; with a method go its hyper-parameters."""
    groups = {name for name in replaced if name not in ("model", "benchmark")}
    for key, value in grid.items():
        if key not in replaced and key.partition(".")[0] not in groups:
            yield f"{key}={str(value).lower() if isinstance(value, bool) else value}"
