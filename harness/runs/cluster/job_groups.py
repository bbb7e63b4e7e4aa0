"""Grouping of cells into jobs by model: a job loads its model once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from espalier.harness.runs.cluster.resources import Resources

C = TypeVar("C", covariant=True)
D = TypeVar("D")


@dataclass(frozen=True)
class JobGroup(Generic[C]):
    """The cells of one job, all of one model, and the resources of the job."""

    model: str
    resources: Resources
    cells: tuple[C, ...]


def group_cells(cells: Sequence[tuple[str, str, Resources, D]], limit: int) -> list[JobGroup[D]]:
    """Return the jobs of cells, models in the order of their first appearance.

    The cells of a model are distributed evenly: with a limit of 16, 17 cells become jobs of 9 and 8.

    Args:
        cells: each with the name of its model, a key that is equal while the model stays loaded, and its resources.
        limit: maximum cells of a job.
    """
    groups: dict[tuple[str, str, Resources], list[D]] = {}
    for name, model, resources, cell in cells:
        groups.setdefault((name, model, resources), []).append(cell)
    # A stable sort keeps different settings of one model together, in their order.
    first = {name: place for place, (name, _, _) in reversed(list(enumerate(groups)))}
    ordered = sorted(groups.items(), key=lambda group: first[group[0][0]])
    return [
        JobGroup(name, resources, part)
        for (name, _, resources), cells_of_group in ordered
        for part in _split_evenly(cells_of_group, limit)
    ]


def _split_evenly(cells: Sequence[D], limit: int) -> list[tuple[D, ...]]:
    """Split a sequence into as few parts as possible, with lengths that differ by at most one."""
    parts = -(-len(cells) // limit)
    ends = [number * len(cells) // parts for number in range(parts + 1)]
    return [tuple(cells[a:b]) for a, b in pairwise(ends)]
