"""Jobs of a sweep: cells grouped by model, which a job loads once, the states of jobs, and the protocol of launchers.

Launchers are the workers of this machine and a queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

from espalier.harness.runs.cluster.job_file import JobFile
from espalier.harness.runs.cluster.resources import Resources

C = TypeVar("C", covariant=True)
D = TypeVar("D")

#: Final states of a job in SLURM; ENDED is our own, for a job that the queue does not know.
OVER = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "TIMEOUT", "ENDED"),
    )
)


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


@dataclass(frozen=True)
class JobState:
    """The state of a job in SLURM's words, and why it waits or has failed."""

    name: str
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether the job has ended for good. Its results are only in the store."""
        return self.name in OVER

    def __str__(self) -> str:
        """Return the state, with the reason if there is one."""
        no_reason = self.reason in ("", "None")
        return self.name if no_reason else f"{self.name} ({self.reason})"


class Launcher(Protocol):
    """Runs jobs.

    Attributes:
        names: of the started jobs, in their order.
    """

    names: list[str]

    def check(self, packs: Sequence[JobGroup[object]]) -> None:
        """Raise UserError if a job can never run."""

    def start(self, packs: Sequence[JobGroup[object]], files: Sequence[JobFile]) -> None:
        """Start or submit the jobs; submitted ones are in `names`, even if the rest is refused."""

    def states(self, names: Sequence[str]) -> Mapping[str, JobState] | None:
        """Return the state of each job; None if there is no answer now."""

    def stop(self) -> str:
        """Stop before the jobs have ended; return a message on those that continue."""
