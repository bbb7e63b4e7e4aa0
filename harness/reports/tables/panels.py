"""What a paper's file says of a figure whose points are not printed: which runs they are, and how they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

#: Columns that a figure's entry leaves to the table.
NAMED = ("model", "method", "budget", "benchmark", "split", "metric")


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Attributes:
        title: in our words.
        where: which of the points it shows, by keys of a cell.
        x: the key of a cell along the axis: `budget` gives lines, anything else bars.
        y: what the axis says.
        line: the key of a cell that tells lines apart.
        lines: which of these there are; empty: all.
        reference: the method over whose scores those of the others are taken, in percent; empty: scores as they are.
    """

    title: str
    where: Mapping[str, str] = field(default_factory=dict)
    x: str = "budget"
    y: str = "score"
    line: str = "method"
    lines: Sequence[str] = ()
    reference: str = ""


def points(grids: Sequence[Mapping[str, Sequence[str]]]) -> Iterator[dict[str, str]]:
    """Yield the names of each point of a figure: the products of lists of names, with empty names for the others."""
    for grid in grids:
        for names in product(*grid.values()):
            yield {**dict.fromkeys(NAMED, ""), "value": "", **dict(zip(grid, names, strict=True))}


def name_of(slug: str, number: str) -> str:
    """Return the name of a table or a figure, as files and presets have it: `d2pruner_table1`, `d2pruner_fig4`."""
    return f"{slug}_{number}" if is_figure(number) else f"{slug}_table{number}"


def called(number: str) -> str:
    """Return what a paper calls a table or a figure: `Table 1`, `Figure 4`."""
    return f"Figure {number.removeprefix('fig')}" if is_figure(number) else f"Table {number}"


def is_figure(number: str) -> bool:
    """Say whether a number is that of a figure, as `fig4` is."""
    return number.startswith("fig")
