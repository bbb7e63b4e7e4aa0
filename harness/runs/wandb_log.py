"""Mirror runs to Weights & Biases: offline unless WANDB_API_KEY is set and the server responds.

A run shows its progress while it is computed, and its row once that is stored; a failure here costs one line on stderr
and a bounded time, never a row.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from multiprocessing.context import TimeoutError as NoAnswer
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError
from urllib.request import urlopen

from filelock import FileLock

from espalier.harness.errors import FOREIGN, UserError, plain, tell_once
from espalier.harness.settings import Names, OneOf, Text, choice, read_value
from espalier.harness.specs.comparable import amount
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.specs.secrets import masked, scrub, wandb_keys, without_keys
from espalier.harness.store import RunDir
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import read_json
from espalier.harness.store.files.folder_checks import below

if TYPE_CHECKING:
    from espalier.harness.evaluation.stated_answers import RunningScore
    from espalier.harness.runs.sample_pictures import SamplePicture


#: Seconds to wait for another command that logs the same run.
PATIENCE = 60.0


def digest_of(row: Mapping[str, Any]) -> str:
    """Return a digest of a row, which distinguishes it from a row recomputed with `force=true`."""
    return sha256(json.dumps(dict(row), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class MirrorMark:
    """The mark of one run; `root` is the wandb folder of its store."""

    root: Path
    key: str

    @classmethod
    def of(cls, store: Path, key: str) -> MirrorMark:
        """Return the mark of a run of a store; raises UserError if the folder is a link."""
        return cls(below(store, "wandb"), key)

    @classmethod
    def all(cls, store: Path) -> list[MirrorMark]:
        """Return the marks of a store, ordered by key."""
        paths = sorted(below(store, "wandb", "mirrored").glob("*.json"))
        return [cls.of(store, path.stem) for path in paths]

    @property
    def path(self) -> Path:
        """The mark's file."""
        return self.root / "mirrored" / f"{self.key}.json"

    def read(self) -> dict[str, Any]:
        """Return the content; empty if the file is missing or damaged, and the run is then logged again."""
        try:
            content = read_json(self.path)
        except FOREIGN:
            return {}
        return content if isinstance(content, dict) else {}

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Return whether exactly this row has been logged."""
        return self.read().get("row_sha256") == digest_of(row)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from logging the run meanwhile.

        Raises:
            filelock.Timeout: another command still logs it after `PATIENCE` seconds.
        """
        below(self.root, "mirrored").mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock"), timeout=PATIENCE):
            yield

    def folders(self) -> list[Path]:
        """Return the offline runs of the key."""
        folders = self.root.glob(f"offline-run-*-{self.key}")
        return sorted(folder for folder in folders if not folder.is_symlink())

    def clear(self) -> None:
        """Remove the mark and the outdated offline runs."""
        self.path.unlink(missing_ok=True)
        for folder in self.folders():
            shutil.rmtree(folder)

    def write(self, row: Mapping[str, Any], options: Mapping[str, Any], folder: Path) -> None:
        """Record that and where a row has been logged, by these options of `wandb.init`."""
        content = {
            "row_sha256": digest_of(row),
            **{name: options.get(name) for name in ("mode", "project", "group")},
            "folder": folder.name,
            "uploaded": options.get("mode") == "online",
        }
        durable.replace(self.path, json.dumps(content, indent=1).encode())

    def uploaded(self) -> None:
        """Record that the server has the run."""
        durable.replace(self.path, json.dumps({**self.read(), "uploaded": True}, indent=1).encode())


#: Arguments of `wandb.init` that are set from the run.
RESERVED = ("id", "name", "dir", "config", "reinit", "settings")

#: Beginnings of words that do not determine the cells of a sweep.
NOT_IDENTIFYING = (
    "-",
    "log",
    "store=",
    "force=",
    "json=",
    "curves=",
    "report=",
    "cluster",
    "hydra",
    "engine.threads=",
)

#: What options take that wandb itself checks late or not at all.
TEXTS = ("entity", "project", "group", "job_type", "notes", "resume_from", "fork_from")
VALUES: Mapping[str, Any] = {
    "mode": Annotated[str, OneOf(("online", "offline", "disabled", "shared"))],
    "tags": Names,
    **dict.fromkeys(TEXTS, Text),
}

#: Beginning of the id of a sweep's comparison; a run's id is its key.
SWEEP = "sweep_"

#: Maximum number of steps that show the progress of a run.
STEPS = 100

#: Errors of an address that does not respond.
SILENT: tuple[type[Exception], ...] = (*FOREIGN, NoAnswer)

#: Timeouts in seconds for a response of the server and for opening a run.
ANSWER, OPEN = 5.0, 20.0


def check(options: Mapping[str, Any]) -> None:
    """Raise UserError if the wandb package is missing or `wandb.init` lacks an option. Cost: its import."""
    if find_spec("wandb") is None:
        raise UserError(
            "log='wandb' needs the package wandb, which is not installed; "
            "valid: none, or pip install 'espalier-vlm[wandb]'"
        )
    # wandb takes a second to import and need not be installed.
    import wandb

    valid = [name for name in inspect.signature(wandb.init).parameters if name not in RESERVED]
    for name in options:
        choice("log.options", name, valid)
    check_values(options)


def check_values(options: Mapping[str, Any]) -> None:
    """Raise UserError if `wandb.init` does not accept an option's value; null means unset."""
    for name, value in _without_nulls(options).items():
        if name in VALUES:
            read_value(f"log.options.{name}", value, VALUES[name])


@contextmanager
def mirrored(
    directory: RunDir, parts: Mapping[str, Any], label: str, spec: RunSpec, group: str | None = None
) -> Iterator[Mirror]:
    """Yield the mirror of a run, which logs it once: while it is computed, if it is, and with its committed row.

    A run uses its key as id, so that logging it again does not create a second run. Failures are reported in one line
    on stderr, after the row is stored.

    Args:
        directory: of the run.
        parts: the values that the key was computed from.
        label: of the row.
        spec: provides the store, options of `wandb.init`, and what of the answers is shown.
        group: of a sweep, if the options name none.
    """
    cell = parts["cell"]
    name = f"{cell['model']} {cell['method']} {amount(cell)} {cell['benchmark']}"
    mirror = Mirror(directory, {**cell, "label": label, **parts}, name, spec, group)
    try:
        yield mirror
        mirror.finish()
    finally:
        mirror.close()


@dataclass
class Mirror:
    """A run in Weights & Biases: opened when its evaluation starts, or else with its row.

    Attributes:
        directory: of the run.
        config: of the run in W&B: its cell flat, and all that its key was computed from.
        name: of the run.
        spec: of the run.
        group: of its sweep.
        pictures: pictures of samples to log with the row.
        running: the headline metric of the answers so far.
    """

    directory: RunDir
    config: Mapping[str, Any]
    name: str
    spec: RunSpec
    group: str | None
    pictures: Sequence[SamplePicture] = ()
    running: RunningScore | None = None
    _run: Any = None
    _options: Mapping[str, Any] = field(default_factory=dict)
    _error: Exception | None = None
    _steps: int = -1

    @property
    def _mark(self) -> MirrorMark:
        return MirrorMark.of(self.spec.store, self.directory.path.name)

    def begin(self, running: RunningScore) -> None:
        """Open the run before its samples are answered, and remember the score that follows their answers."""
        self.running = running
        with self._trouble():
            self._open()

    def progress(self, done: int, total: int) -> None:
        """Log the number of answered samples and the headline metric so far, `STEPS` times at most."""
        step = done * STEPS // max(total, 1)
        if self._run is None or self._error is not None or step == self._steps:
            return
        self._steps = step
        values = {"progress/samples": done, "progress/share": done / max(total, 1)}
        headline = f"progress/{self.spec.benchmark.headline}"
        score = None if self.running is None else self.running.value
        with self._trouble():
            self._run.log(values if score is None else {**values, headline: score})

    def finish(self) -> None:
        """Log the committed row; skipped if exactly this row was logged before."""
        row, mark = self.directory.row(), self._mark
        if row is not None and self._run is None and mark.matches(row):
            return
        with self._trouble():
            if row is not None and self._error is None:
                with mark.locked():
                    self._log(row)
        self._tell("; its row is in the store")

    def close(self) -> None:
        """End the run as failed, unless it has ended with its row."""
        run, self._run = self._run, None
        with self._trouble():
            if run is not None:
                run.finish(exit_code=1)
        self._tell()
        scrub(logs(self.spec.store / "wandb", self.directory.path.name), wandb_keys())

    def _log(self, row: Mapping[str, Any]) -> None:
        # wandb takes a second to import and need not be installed.
        from espalier.harness.runs import wandb_content as content

        if self._run is None:
            if self._mark.matches(row):  # another command logged it meanwhile
                return
            self._open()
        folder, samples = Path(self._run.dir).parent, self.spec.log_samples
        with _wandb_folders(self.spec.store / "wandb"):
            entries = self.directory.journal.entries()
            self._run.log(content.history(row, entries, samples, self.pictures))
            self._run.summary.update(dict(row))
            self._run.log_artifact(content.artifact(self.directory))
            run, self._run = self._run, None
            run.finish()
        self._mark.write(row, self._options, folder)

    def _open(self) -> None:
        # Remove the rest of a killed command, or the run of an earlier row: a key has one run.
        self._mark.clear()
        self._options = options_of(self.spec, self.group)
        key = self.directory.path.name
        self._run = open_run(
            self.spec.store, self._options, id=key, name=self.name, config=dict(self.config)
        )

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        """Keep an error of wandb, which costs the mirror and never the run."""
        try:
            yield
        except Exception as error:  # a third-party service can fail in any way
            self._error = self._error or error

    def _tell(self, remark: str = "") -> None:
        """Print the error, once."""
        error, self._error = self._error, None
        if error is not None:
            _tell(f"run {self.directory.path.name} was not logged", error, remark)


def compare(rows: Sequence[Mapping[str, Any]], spec: RunSpec, group: str) -> None:
    """Log the rows of a sweep as one table, in a separate run within their group; a failure is one line on stderr."""
    options = options_of(spec, group)
    key = f"{SWEEP}{sha256(str(options['group']).encode()).hexdigest()[:8]}"
    mark = MirrorMark.of(spec.store, key)
    content = {
        "run_key": key,
        "metrics": {},
        "rows": {row["run_key"]: row["metrics"] for row in rows},
    }
    if mark.matches(content):
        return
    try:
        # wandb takes a second to import and need not be installed.
        from espalier.harness.runs.wandb_content import comparison

        mark.clear()
        run = open_run(
            spec.store, {**options, "job_type": "comparison"}, id=key, name="comparison", config={}
        )
        with _wandb_folders(spec.store / "wandb"):
            run.log({"comparison": comparison(rows)})
            run.summary.update({"run_key": key, "rows": len(rows)})
            folder = Path(run.dir).parent
            run.finish()
        mark.write(content, options, folder)
    except Exception as error:  # a third-party service can fail in any way
        _tell("the sweep was not compared", error)


def _tell(problem: str, error: Exception, remark: str = "") -> None:
    line = plain(masked(next(iter(str(error).splitlines()), ""), wandb_keys()))
    text = f"log=wandb: {problem}: {type(error).__name__}: {line}{remark}"
    print(text, file=sys.stderr, flush=True)


def options_of(spec: RunSpec, group: str | None) -> dict[str, Any]:
    """Return the options of `wandb.init` for a run."""
    return {"mode": mode(), "group": group, **_without_nulls(spec.log_options)}


def open_run(store: Path, options: Mapping[str, Any], **settings: Any) -> Any:
    """Open a run below a store's wandb folder; raises UserError if a link, through which wandb writes, leads out."""
    for path in (store / "wandb").rglob("*"):
        if path.is_symlink() and not _lies_in(path, store / "wandb"):
            raise UserError(f"{path} leads out of the store; valid: without the link")
    # wandb takes a second to import and need not be installed.
    import wandb

    with _wandb_folders(store / "wandb"):
        return wandb.init(
            **options,
            **settings,
            dir=str(store),
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, init_timeout=OPEN
            ),
        )


def logs(folder: Path, key: str) -> list[Path]:
    """Return wandb's own log files of a run, which can contain responses of servers."""
    places = (
        "*.log",
        f"*run-*-{key}/logs/*",
        f"*run-*-{key}/*.log",
        "cache/logs/**/*",
        "cache/wandb/logs/**/*",
    )
    files = (path for place in places for path in folder.glob(place) if path.is_file())
    return [path for path in files if _lies_in(path, folder)]


def _lies_in(path: Path, folder: Path) -> bool:
    # Links to themselves lead nowhere.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def group_of(argv: Sequence[str]) -> str:
    """Return the name of a sweep: its identifying command-line words, and a digest to distinguish long ones.

    Words that do not determine the cells are omitted, so that a resumed sweep keeps its name.
    """
    kept = [word for word in argv if not word.lstrip("+~").startswith(NOT_IDENTIFYING)]
    digest = sha256("\n".join(kept).encode()).hexdigest()[:8]
    return f"{' '.join(kept)[:100]} {digest}"


def _without_nulls(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def _wandb_folders(folder: Path) -> Iterator[None]:
    """Keep wandb's artifacts and settings in a folder; files in the home directory would not move with it."""
    folder.mkdir(parents=True, exist_ok=True)
    folders = {f"WANDB_{name}_DIR": folder / name.lower() for name in ("DATA", "CACHE", "CONFIG")}
    added = {name: str(path) for name, path in folders.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def mode() -> str:
    """Return `online` if a key is set and the server responds, else `offline`."""
    if not os.environ.get("WANDB_API_KEY"):
        return "offline"
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if reachable(address):
        return "online"
    tell_once(
        f"log=wandb: {masked(without_keys(address), wandb_keys())} does not respond; runs are logged offline, "
        "`python -m espalier wandb` sends them"
    )
    return "offline"


@cache
def reachable(address: str) -> bool:
    """Return whether a server responds at all, through a proxy if one is set. Cost: once, `ANSWER` seconds at most."""
    # The name lookup has no timeout; after `ANSWER` seconds the thread is abandoned.
    answer = ThreadPool(1).apply_async(urlopen, (address,), {"timeout": ANSWER})
    try:
        answer.get(ANSWER).close()
    except HTTPError:
        return True  # a refusal is a response
    except SILENT:
        return False
    return True
