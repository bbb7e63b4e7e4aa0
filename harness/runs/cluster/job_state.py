"""How far a job is, and what carries jobs out: the one protocol of workers on this machine and of a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from espalier.harness.runs.cluster.job_file import JobFile
from espalier.harness.runs.cluster.job_groups import Pack

#: States of SLURM in which a job does not run any more, and is not going to; ENDED is ours, for one that nobody knows.
OVER = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "TIMEOUT", "ENDED"),
    )
)


@dataclass(frozen=True)
class State:
    """What is said of a job: its state in SLURM's words, and why it waits or has failed."""

    name: str
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether the job has ended for good. What it has done stands in the store alone."""
        return self.name in OVER

    def __str__(self) -> str:
        """Return both, the reason only where there is one."""
        silent = self.reason in ("", "None")
        return self.name if silent else f"{self.name} ({self.reason})"


class Launcher(Protocol):
    """What carries out jobs.

    Attributes:
        names: of the jobs that it has started, in their order.
    """

    names: list[str]

    def check(self, packs: Sequence[Pack[object]]) -> None:
        """Raise UserError where a job can never be carried out."""

    def start(self, packs: Sequence[Pack[object]], files: Sequence[JobFile]) -> None:
        """Start or submit the jobs; what is submitted stands in `names`, also if the rest is refused."""

    def states(self, names: Sequence[str]) -> Mapping[str, State] | None:
        """Return the state of each job; None where nobody answers just now."""

    def stop(self) -> str:
        """Leave before the jobs have ended; return what is to be said of those that go on."""
