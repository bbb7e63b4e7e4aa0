"""Cells are packed into jobs by model: a job loads its model once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from espalier.harness.runs.cluster.resources import Resources

C = TypeVar("C", covariant=True)
D = TypeVar("D")


@dataclass(frozen=True)
class Pack(Generic[C]):
    """The cells of one job, all of one model, and what the job takes."""

    model: str
    resources: Resources
    cells: tuple[C, ...]


def pack(cells: Sequence[tuple[str, str, Resources, D]], at_most: int) -> list[Pack[D]]:
    """Return the jobs of cells, models in the order in which they first appear.

    The cells of a model are dealt out evenly: 17 of them are jobs of 9 and 8, where 16 are allowed.

    Args:
        cells: each with the name of its model, what must be equal for the model to stay loaded, and what it takes.
        at_most: cells of a job.
    """
    groups: dict[tuple[str, str, Resources], list[D]] = {}
    for name, model, resources, cell in cells:
        groups.setdefault((name, model, resources), []).append(cell)
    # A stable sort: what a model loads differently follows what it loads first.
    first = {name: place for place, (name, _, _) in reversed(list(enumerate(groups)))}
    ordered = sorted(groups.items(), key=lambda group: first[group[0][0]])
    return [
        Pack(name, resources, part)
        for (name, _, resources), found in ordered
        for part in _dealt(found, at_most)
    ]


def _dealt(cells: Sequence[D], at_most: int) -> list[tuple[D, ...]]:
    """Cut a sequence into as few parts as possible, whose lengths differ by one at most."""
    parts = -(-len(cells) // at_most)
    ends = [number * len(cells) // parts for number in range(parts + 1)]
    return [tuple(cells[a:b]) for a, b in pairwise(ends)]
