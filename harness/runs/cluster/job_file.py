"""A job on disk: its cells, and next to them their results.

`job-003.json` holds the composed cells; `espalier run --cells job-003.json` runs them. `job-003.left_out.json` lists
cells without a row, each with the reason, `job-003.end.json` the exit code of the process, `job-003.log` its output.
Only the row in the store shows that a cell is finished.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from espalier.harness.errors import FOREIGN, first_words, foreign, tell_once
from espalier.harness.paths import child_path
from espalier.harness.runs.cluster.resources import Resources
from espalier.harness.specs.comparable import grouped
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import read_json

C = TypeVar("C", covariant=True)
D = TypeVar("D")


@dataclass(frozen=True)
class JobCell:
    """One cell of a job; its fields are stored under these names.

    Attributes:
        key: of its run.
        row: path of its row.
        before: when the row that existed at the submission was written, in nanoseconds; None: there was none.
        config: the composed config.
        conf: further folders of configs.
    """

    key: str
    row: str
    before: int | None
    config: Mapping[str, Any]
    conf: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a field of another type: the file is not one of a job."""
        kinds = {"key": str, "row": str, "before": int | None, "config": Mapping}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}")

    @property
    def done(self) -> bool:
        """Whether a row has appeared since the submission."""
        return row_time(Path(self.row)) not in (None, self.before)


@dataclass(frozen=True)
class LeftOut:
    """A cell without a row, the reason and the exit code."""

    key: str
    reason: str
    code: int


@dataclass(frozen=True)
class JobFile:
    """The file of one job."""

    path: Path

    @property
    def log(self) -> Path:
        """Output of the job; a job that is queued again continues the same file."""
        return self.path.with_suffix(".log")

    def write(self, entries: Sequence[JobCell]) -> None:
        """Write the cells. Raises StoreLost if the disk does not take them."""
        self._write("", [asdict(entry) for entry in entries])

    def entries(self) -> list[JobCell]:
        """Return the cells.

        Raises:
            UserError: the file does not exist, or is not one of a job.
        """
        with foreign(
            f"--cells {self.path} is not a file of a job", "<store>/cluster/<sweep>/job-<n>.json"
        ):
            return [JobCell(**fields) for fields in read_json(self.path)]

    def leave_out(self, cells: Sequence[LeftOut]) -> None:
        """Store the cells without a row so far, replacing the former list."""
        self._write(".left_out", [asdict(cell) for cell in cells])

    def left_out(self) -> dict[str, LeftOut]:
        """Return the stored cells without a row, by key."""

        def cells(stored: Any) -> dict[str, LeftOut]:
            entries = [LeftOut(**fields) for fields in stored]
            return {cell.key: cell for cell in entries if isinstance(cell.code, int)}

        return self._read(".left_out", cells) or {}

    def begin(self) -> None:
        """Remove the results of an earlier attempt."""
        for part in (".left_out", ".end"):
            self._path(part).unlink(missing_ok=True)

    def end(self, code: int) -> None:
        """Store the exit code of the process; negative: the number of the signal that killed it."""
        self._write(".end", {"code": code})

    def ended(self) -> int | None:
        """Return the exit code; None while the process runs, or if it was killed before storing it."""
        return self._read(".end", lambda stored: int(stored["code"]))

    def _path(self, part: str) -> Path:
        return self.path.with_suffix(f"{part}.json")

    def _write(self, part: str, content: Any) -> None:
        durable.replace(self._path(part), f"{json.dumps(content)}\n".encode())

    def _read(self, part: str, parse: Callable[[Any], D]) -> D | None:
        # It appears by rename: complete or not at all.
        path = self._path(part)
        try:
            return parse(read_json(path))
        except FileNotFoundError:
            return None
        except FOREIGN as error:
            tell_once(f"passed over: {path}: {first_words(error)}")
            return None


def row_time(row: Path) -> int | None:
    """Return when a row was written, in nanoseconds; None if it does not exist."""
    try:
        return row.stat().st_mtime_ns
    except OSError:  # missing or unreadable; reading it reports the reason
        return None


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
    groups = grouped(((name, model, resources), cell) for name, model, resources, cell in cells)
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
    count, parts = len(cells), -(-len(cells) // limit)
    places = [(count * number // parts, count * (number + 1) // parts) for number in range(parts)]
    return [tuple(cells[start:end]) for start, end in places]


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
        return self.name if self.reason in ("", "None") else f"{self.name} ({self.reason})"


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


#: Seconds that a job has to end after SIGTERM: enough to finish a batch and its journal.
PATIENCE = 30.0

#: Seconds that a job waits for SLURM to end it after requesting that: a job that exits by itself would count as
#: finished, and would not be queued again after a preemption.
MAX_HOLD = 3600.0

#: Exit codes after `scontrol requeue`, `scancel` and SIGTERM.
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


def run_job(
    job: JobFile, environment: Mapping[str, str], stop: Callable[[], bool] = lambda: False
) -> int:
    """Run the cells of a job that have no row yet; return the exit code, which is also stored next to the file.

    Args:
        job: the cells.
        environment: variables in addition to this process's own.
        stop: called twice a second; returns whether to end early.
    """
    job.begin()
    if all(entry.done for entry in job.entries()):
        job.end(0)
        return 0
    with start(job, environment) as process:
        try:
            while process.poll() is None:
                if stop():
                    _end(process)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        except BaseException:
            _end(process)
            raise
    job.end(process.returncode)
    return process.returncode


def start(job: JobFile, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `espalier run` on the cells of a job; its output is appended to the job's log."""
    with job.log.open("ab") as log:
        return subprocess.Popen(
            # The shell's `trap` outlives `exec`: SLURM signals every process of a step, but we stop this one ourselves.
            ["/bin/sh", "-c", 'trap "" USR2; exec "$@"', "sh", *_command(job.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **child_path(), **environment},
        )


def _command(path: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "espalier", "run", "--cells", str(path)]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass
class SlurmJob:
    """The callable that submitit runs in a job of SLURM; after a preemption or a time limit it is queued again."""

    path: str
    _terminating: bool = field(default=False, init=False)

    def __call__(self) -> int:
        """Run the cells and return the exit code."""
        former = signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            code = run_job(JobFile(Path(self.path)), {})
        finally:
            signal.signal(signal.SIGTERM, former)
        end = time.monotonic() + MAX_HOLD
        while self._terminating and code in TERMINATED and time.monotonic() < end:
            time.sleep(1.0)
        return code

    def checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Return the call to run when SLURM starts the job again; the cells end when this process exits."""
        # Imported here: most jobs are never queued again.
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(SlurmJob(self.path))

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminating = True
