"""A job on disk: the cells that it is to run, and beside them what became of it.

`job-003.json` holds the cells, composed; `run.py --cells job-003.json` runs them. `job-003.left_out.json` has the cells
that gave no row, each with the reason, `job-003.end.json` how the process ended, `job-003.log` what it printed. Whether
a cell is finished is said by its row in the store and by nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, first_words, foreign, tell_once
from espalier.harness.store.files import durable
from espalier.harness.store.files.untrusted_json import read_json


@dataclass(frozen=True)
class Entry:
    """One cell of a job.

    Attributes:
        key: of its run.
        row: where its row appears.
        before: when the row was written that stood there at the submission, in nanoseconds; None: there was none.
        config: the composed config.
    """

    key: str
    row: str
    before: int | None
    config: Mapping[str, Any]

    @property
    def done(self) -> bool:
        """Whether a row has appeared since the submission."""
        return written(Path(self.row)) not in (None, self.before)


@dataclass(frozen=True)
class LeftOut:
    """A cell that gave no row, why, and with which exit code."""

    key: str
    reason: str
    code: int


@dataclass(frozen=True)
class JobFile:
    """The file of one job."""

    path: Path

    @property
    def log(self) -> Path:
        """Where the job prints; a job that is queued again goes on in the same file."""
        return self.path.with_suffix(".log")

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the cells. Raises StoreLost if the disk does not take them."""
        self._write("", [asdict(entry) for entry in entries])

    def entries(self) -> list[Entry]:
        """Return the cells.

        Raises:
            UserError: there is no such file, or it is none of a job.
        """
        with foreign(
            f"--cells {self.path} is no file of a job", "<store>/cluster/<sweep>/job-<n>.json"
        ):
            return [_entry(told) for told in read_json(self.path)]

    def leave_out(self, cells: Sequence[LeftOut]) -> None:
        """Note which cells gave no row so far, in place of what was noted."""
        self._write(".left_out", [asdict(cell) for cell in cells])

    def left_out(self) -> dict[str, LeftOut]:
        """Return what was noted, by key."""
        found = self._read(".left_out")
        try:
            cells = [LeftOut(**told) for told in found or ()]
            return {cell.key: cell for cell in cells if isinstance(cell.code, int)}
        except FOREIGN as error:
            tell_once(f"passed over: {self._beside('.left_out')}: {first_words(error)}")
            return {}

    def begin(self) -> None:
        """Forget what is noted of an earlier attempt."""
        for part in (".left_out", ".end"):
            self._beside(part).unlink(missing_ok=True)

    def end(self, code: int) -> None:
        """Note how the process ended: its exit code, below 0 the number of the signal that killed it."""
        self._write(".end", {"code": code})

    def ended(self) -> int | None:
        """Return the exit code; None while it runs, and if nobody lived to note it."""
        found = self._read(".end")
        code = found.get("code") if isinstance(found, Mapping) else None
        return code if isinstance(code, int) else None

    def _beside(self, part: str) -> Path:
        return self.path.with_suffix(f"{part}.json")

    def _write(self, part: str, content: Any) -> None:
        durable.replace(self._beside(part), f"{json.dumps(content)}\n".encode())

    def _read(self, part: str) -> Any:
        # It appears by rename: it is whole or not there.
        path = self._beside(part)
        try:
            return read_json(path)
        except FileNotFoundError:
            return None
        except FOREIGN as error:
            tell_once(f"passed over: {path}: {first_words(error)}")
            return None


def _entry(told: Mapping[str, Any]) -> Entry:
    entry = Entry(**told)
    kinds = {"key": str, "row": str, "before": int | None, "config": Mapping}
    for name, kind in kinds.items():
        if not isinstance(told[name], kind):
            raise ValueError(f"{name} is {told[name]!r}")
    return entry


def written(row: Path) -> int | None:
    """Return when a row was written, in nanoseconds; None if it is not there."""
    try:
        return row.stat().st_mtime_ns
    except OSError:  # none, or not to be looked at: whoever reads it says why
        return None
