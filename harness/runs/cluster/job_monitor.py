"""Jobs until they have ended: how far they are, and why a cell that they were given has no row."""

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
from espalier.harness.runs.cluster.job_file import Entry, JobFile, LeftOut
from espalier.harness.runs.cluster.job_state import Launcher, State
from espalier.harness.runs.forecast import clock
from espalier.harness.runs.status_line import Waiting
from espalier.harness.store.files.untrusted_json import read_json

#: Seconds that a job whose cells are all done is waited for: a queue may take a dead one for running.
LINGERING = 30.0

#: Seconds between two lines where nobody sees a line change.
QUIET = 30.0


@dataclass(frozen=True)
class Jobs:
    """Jobs by name, each with its file, and their last known states."""

    files: Mapping[str, JobFile] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    @classmethod
    def standing(cls, store: Path, launcher: Launcher) -> Jobs:
        """Return the jobs of earlier commands on this store that have not ended, as far as the launcher knows any."""
        files = {
            name: file for folder in sorted(store.glob("cluster/*")) for name, file in _jobs(folder)
        }
        states = launcher.states(list(files)) if files else {}
        live = {name for name, state in (states or {}).items() if not state.over}
        return cls({name: file for name, file in files.items() if name in live})

    @cached_property
    def entries(self) -> dict[str, list[Entry]]:
        """The cells of each job."""
        return {name: file.entries() for name, file in self.files.items()}

    @cached_property
    def keys(self) -> frozenset[str]:
        """The runs of all cells."""
        return frozenset(entry.key for found in self.entries.values() for entry in found)

    def of(self, keys: Collection[str]) -> Jobs:
        """Return those jobs that have a cell of these runs."""
        wanted = {
            name for name, found in self.entries.items() if any(one.key in keys for one in found)
        }
        return Jobs({name: file for name, file in self.files.items() if name in wanted})

    def plus(self, other: Jobs) -> Jobs:
        """Return these jobs and others."""
        return Jobs({**self.files, **other.files})

    def missing(self, key: str) -> LeftOut | None:
        """Return why a run has no new row; None if it has one, or if no job was to make it."""
        for name, found in self.entries.items():
            entry = next((one for one in found if one.key == key), None)
            if entry is not None and not entry.done:
                return self._reason(name, key)
        return None

    def __bool__(self) -> bool:
        """Say whether there is one."""
        return bool(self.files)

    def __str__(self) -> str:
        """Say how many, and their names."""
        names = list(self.files)
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"{len(names)} job{'s' if len(names) > 1 else ''} ({which})"

    def _reason(self, name: str, key: str) -> LeftOut:
        file, state = self.files[name], self.states.get(name, State("ENDED"))
        noted, code = file.left_out().get(key), file.ended()
        if noted is not None:
            return noted
        where = f"job {name}"
        if code is None:
            return LeftOut(key, f"{where} ended before this cell was done: {state}; {file.log}", 1)
        if code < 0:
            known = -code in set(signal.Signals)
            killer = signal.Signals(-code).name if known else f"signal {-code}"
            return LeftOut(key, f"the process of {where} was killed by {killer}; {file.log}", 1)
        if code:
            return LeftOut(key, f"{where}: {_last_error(file.log) or f'exit code {code}'}", code)
        changed = "code, packages or weights changed since the submission"
        return LeftOut(key, f"{where} made a row of another key: {changed}", 1)


def watch(
    jobs: Jobs,
    launcher: Launcher,
    poll: float,
    waiting: Waiting,
    tell: Callable[[str], None],
) -> None:
    """Return when all jobs have ended, and say meanwhile how far they are.

    Args:
        jobs: whose states are kept up to date.
        launcher: that carries them out.
        poll: seconds between two looks.
        waiting: the line of a terminal.
        tell: prints a line where there is no terminal.
    """
    line = _Line(waiting, tell)
    ends: Counter[str] = Counter()
    whole: dict[str, float] = {}
    try:
        while True:
            states = launcher.states(list(jobs.files))
            if states is None:
                line.say("the queue does not answer; what runs goes on")
            else:
                jobs.states.update(states)
                for name, state in states.items():
                    # A job that is being queued again may look ended for a moment.
                    ends[name] = ends[name] + 1 if state.over else 0
                    if all(entry.done for entry in jobs.entries[name]):
                        whole.setdefault(name, time.monotonic())
                left = [name for name in jobs.files if not _ended(name, ends, whole)]
                line.say(_summary(jobs, states))
                if not left:
                    return
            time.sleep(poll)
    except BaseException:
        waiting.clear()
        if said := launcher.stop():
            tell(said)
        raise
    finally:
        waiting.clear()


def _ended(name: str, ends: Mapping[str, int], whole: Mapping[str, float]) -> bool:
    lingers = name in whole and time.monotonic() - whole[name] > LINGERING
    return ends[name] >= 2 or (name in whole and ends[name] >= 1) or lingers


def _summary(jobs: Jobs, states: Mapping[str, State]) -> str:
    """Return how many cells are done, and how the jobs are."""
    cells = [entry for found in jobs.entries.values() for entry in found]
    done = sum(entry.done for entry in cells)
    counts = Counter("ended" if state.over else str(state) for state in states.values())
    told = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return f"{done} of {len(cells)} cells done; jobs: {told}"


class _Line:
    """A line that changes on a terminal; elsewhere a new one now and then, when there is news."""

    def __init__(self, waiting: Waiting, tell: Callable[[str], None]) -> None:
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
        found = {str(name): folder / file for name, file in read_json(about)["jobs"].items()}
    except FOREIGN as error:
        tell_once(f"passed over: {about}: {first_words(error)}")
        return
    for name, file in found.items():
        yield name, JobFile(file)


def _last_error(log: Path) -> str | None:
    """Return the last line of a log that tells an error."""
    lines: Sequence[str] = (
        log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else ()
    )
    told = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    return told[-1] if told else None
