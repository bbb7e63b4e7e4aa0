"""Monitoring of jobs until they have ended: their progress, and the reasons for cells without a row."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from espalier.harness.errors import FOREIGN, first_words, tell_once
from espalier.harness.runs.cluster.job_file import JobCell, JobFile, JobState, Launcher, LeftOut
from espalier.harness.runs.progress_bar import clock
from espalier.harness.runs.status_line import StatusLine
from espalier.harness.store.files.digests import read_json

#: Seconds to wait for a job after all its cells are done: a queue may list a dead job as running.
LINGERING = 30.0

#: Seconds between two lines without a terminal.
QUIET = 30.0


@dataclass(frozen=True)
class Jobs:
    """Jobs by name, each with its file, and their last known states."""

    files: Mapping[str, JobFile] = field(default_factory=dict)
    states: dict[str, JobState] = field(default_factory=dict)

    @classmethod
    def unfinished(cls, store: Path, launcher: Launcher) -> Jobs:
        """Return the jobs of earlier commands on this store that have not ended, as far as the launcher knows them."""
        files = {
            name: file for folder in sorted(store.glob("cluster/*")) for name, file in _jobs(folder)
        }
        states = launcher.states(list(files)) if files else {}
        live = {name for name, state in (states or {}).items() if not state.over}
        return cls({name: file for name, file in files.items() if name in live})

    @cached_property
    def entries(self) -> dict[str, list[JobCell]]:
        """The cells of each job."""
        return {name: file.entries() for name, file in self.files.items()}

    @cached_property
    def keys(self) -> frozenset[str]:
        """Run keys of all cells."""
        return frozenset(entry.key for cells in self.entries.values() for entry in cells)

    def of(self, keys: Collection[str]) -> Jobs:
        """Return the jobs that have a cell of these runs."""
        wanted = {
            name for name, cells in self.entries.items() if any(cell.key in keys for cell in cells)
        }
        return Jobs({name: file for name, file in self.files.items() if name in wanted})

    def merged(self, jobs: Jobs) -> Jobs:
        """Return these jobs and others."""
        return Jobs({**self.files, **jobs.files})

    def missing(self, key: str) -> LeftOut | None:
        """Return why a run has no new row; None if it has one, or if no job has its cell."""
        for name, cells in self.entries.items():
            entry = next((cell for cell in cells if cell.key == key), None)
            if entry is not None and not entry.done:
                return self._reason(name, key)
        return None

    def __bool__(self) -> bool:
        """Return whether there is any job."""
        return bool(self.files)

    def __str__(self) -> str:
        """Return their number and names."""
        names = list(self.files)
        names_text = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"{len(names)} job{'s' if len(names) > 1 else ''} ({names_text})"

    def _reason(self, name: str, key: str) -> LeftOut:
        file, state = self.files[name], self.states.get(name, JobState("ENDED"))
        noted, code = file.left_out().get(key), file.ended()
        if noted is not None:
            return noted
        job = f"job {name}"
        if code is None:
            return LeftOut(key, f"{job} ended before this cell was done: {state}; {file.log}", 1)
        if code < 0:
            named = -code in set(signal.Signals)
            killer = signal.Signals(-code).name if named else f"signal {-code}"
            return LeftOut(key, f"the process of {job} was killed by {killer}; {file.log}", 1)
        if code:
            return LeftOut(key, f"{job}: {_last_error(file.log) or f'exit code {code}'}", code)
        changed = "code, packages or weights changed since the submission"
        return LeftOut(key, f"{job} made a row of another key: {changed}", 1)


def watch(
    jobs: Jobs,
    launcher: Launcher,
    poll: float,
    waiting: StatusLine,
    tell: Callable[[str], None],
) -> None:
    """Return when all jobs have ended, and report their progress meanwhile.

    Args:
        jobs: their states are updated.
        launcher: runs the jobs.
        poll: seconds between two queries.
        waiting: the line of a terminal.
        tell: prints a line without a terminal.
    """
    line = _ProgressLine(waiting, tell)
    ends: Counter[str] = Counter()
    complete_since: dict[str, float] = {}
    try:
        while True:
            states = launcher.states(list(jobs.files))
            if states is None:
                line.say("the queue does not answer; running jobs continue")
            else:
                jobs.states.update(states)
                for name, state in states.items():
                    # A job that is being queued again may look ended for a moment.
                    ends[name] = ends[name] + 1 if state.over else 0
                    if all(entry.done for entry in jobs.entries[name]):
                        complete_since.setdefault(name, time.monotonic())
                running = [name for name in jobs.files if not _ended(name, ends, complete_since)]
                line.say(_summary(jobs, states))
                if not running:
                    return
            time.sleep(poll)
    except BaseException:
        waiting.clear()
        if message := launcher.stop():
            tell(message)
        raise
    finally:
        waiting.clear()


def _ended(name: str, ends: Mapping[str, int], complete_since: Mapping[str, float]) -> bool:
    lingers = name in complete_since and time.monotonic() - complete_since[name] > LINGERING
    return ends[name] >= 2 or (name in complete_since and ends[name] >= 1) or lingers


def _summary(jobs: Jobs, states: Mapping[str, JobState]) -> str:
    """Return the number of finished cells, and the states of the jobs."""
    cells = [entry for job_cells in jobs.entries.values() for entry in job_cells]
    done = sum(entry.done for entry in cells)
    counts = Counter("ended" if state.over else str(state) for state in states.values())
    states_text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return f"{done} of {len(cells)} cells done; jobs: {states_text}"


class _ProgressLine:
    """A line that changes on a terminal; otherwise a new line from time to time, if it changed."""

    def __init__(self, waiting: StatusLine, tell: Callable[[str], None]) -> None:
        self._waiting, self._tell = waiting, tell
        self._start = time.monotonic()
        self._last, self._told = "", -QUIET

    def say(self, text: str) -> None:
        elapsed = time.monotonic() - self._start
        if sys.stderr is not None and sys.stderr.isatty():
            self._waiting.say(f"{clock(elapsed)}  {text}")
        elif text != self._last and elapsed - self._told >= QUIET:
            self._tell(text)
            self._last, self._told = text, elapsed


def _jobs(folder: Path) -> Iterator[tuple[str, JobFile]]:
    """Yield the jobs that a command has submitted; a folder without their names has none."""
    about = folder / "sweep.json"
    if not about.exists():
        return
    try:
        files = {str(name): folder / file for name, file in read_json(about)["jobs"].items()}
    except FOREIGN as error:
        tell_once(f"passed over: {about}: {first_words(error)}")
        return
    for name, file in files.items():
        yield name, JobFile(file)


def _last_error(log: Path) -> str | None:
    """Return the last error line of a log."""
    lines: Sequence[str] = (
        log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else ()
    )
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else None
