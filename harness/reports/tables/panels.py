"""Figures without printed points, as described by a paper's file: which runs they are, and how they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

#: Columns that a figure's grid fills.
NAMED = ("model", "method", "budget", "benchmark", "split", "metric")


@dataclass(frozen=True)
class FigurePanel:
    """One panel of a figure.

    Attributes:
        title: in our words.
        where: which points it shows, by keys of a cell.
        x: the key of a cell along the axis: `budget` gives lines, anything else bars.
        y: label of the axis.
        line: the key of a cell that separates lines.
        lines: names of the lines; empty: all.
        reference: the method that the other scores are relative to, in percent; empty: absolute scores.
    """

    title: str
    where: Mapping[str, str] = field(default_factory=dict)
    x: str = "budget"
    y: str = "score"
    line: str = "method"
    lines: Sequence[str] = ()
    reference: str = ""


def points(grids: Sequence[Mapping[str, Sequence[str]]]) -> Iterator[dict[str, str]]:
    """Yield the names of each point of a figure: products of lists of names; other names are empty."""
    for grid in grids:
        for names in product(*grid.values()):
            yield {**dict.fromkeys(NAMED, ""), "value": "", **dict(zip(grid, names, strict=True))}


def name_of(slug: str, number: str) -> str:
    """Return the name of a table or figure in files and presets: `d2pruner_table1`, `d2pruner_fig4`."""
    return f"{slug}_{number}" if is_figure(number) else f"{slug}_table{number}"


def display_name(number: str) -> str:
    """Return the paper's name of a table or figure: `Table 1`, `Figure 4`."""
    return f"Figure {number.removeprefix('fig')}" if is_figure(number) else f"Table {number}"


def is_figure(number: str) -> bool:
    """Return whether a number names a figure, such as `fig4`."""
    return number.startswith("fig")
