"""The state of a job, and the common protocol of launchers: workers on this machine and a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from espalier.harness.runs.cluster.job_file import JobFile
from espalier.harness.runs.cluster.job_groups import JobGroup

#: Final states of a job in SLURM; ENDED is our own, for a job that the queue does not know.
OVER = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "TIMEOUT", "ENDED"),
    )
)


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
