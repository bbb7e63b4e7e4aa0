"""A job on disk: its cells, and next to them their results.

`job-003.json` holds the composed cells; `espalier run --cells job-003.json` runs them. `job-003.left_out.json` lists
cells without a row, each with the reason, `job-003.end.json` the exit code of the process, `job-003.log` its output.
Only the row in the store shows that a cell is finished.
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

    @property
    def folders(self) -> tuple[Path, ...]:
        """Further folders of configs, as paths."""
        return tuple(map(Path, self.conf))

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
            return [_entry(fields) for fields in read_json(self.path)]

    def leave_out(self, cells: Sequence[LeftOut]) -> None:
        """Store the cells without a row so far, replacing the former list."""
        self._write(".left_out", [asdict(cell) for cell in cells])

    def left_out(self) -> dict[str, LeftOut]:
        """Return the stored cells without a row, by key."""
        stored = self._read(".left_out")
        try:
            cells = [LeftOut(**fields) for fields in stored or ()]
            return {cell.key: cell for cell in cells if isinstance(cell.code, int)}
        except FOREIGN as error:
            tell_once(f"passed over: {self._path('.left_out')}: {first_words(error)}")
            return {}

    def begin(self) -> None:
        """Remove the results of an earlier attempt."""
        for part in (".left_out", ".end"):
            self._path(part).unlink(missing_ok=True)

    def end(self, code: int) -> None:
        """Store the exit code of the process; negative: the number of the signal that killed it."""
        self._write(".end", {"code": code})

    def ended(self) -> int | None:
        """Return the exit code; None while the process runs, or if it was killed before storing it."""
        stored = self._read(".end")
        code = stored.get("code") if isinstance(stored, Mapping) else None
        return code if isinstance(code, int) else None

    def _path(self, part: str) -> Path:
        return self.path.with_suffix(f"{part}.json")

    def _write(self, part: str, content: Any) -> None:
        durable.replace(self._path(part), f"{json.dumps(content)}\n".encode())

    def _read(self, part: str) -> Any:
        # It appears by rename: complete or not at all.
        path = self._path(part)
        try:
            return read_json(path)
        except FileNotFoundError:
            return None
        except FOREIGN as error:
            tell_once(f"passed over: {path}: {first_words(error)}")
            return None


def _entry(fields: Mapping[str, Any]) -> JobCell:
    entry = JobCell(**fields)
    kinds = {"key": str, "row": str, "before": int | None, "config": Mapping}
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} is {fields[name]!r}")
    return entry


def row_time(row: Path) -> int | None:
    """Return when a row was written, in nanoseconds; None if it does not exist."""
    try:
        return row.stat().st_mtime_ns
    except OSError:  # missing or unreadable; reading it reports the reason
        return None
