"""Mirror a committed row to Weights & Biases: offline unless WANDB_API_KEY is set and the server responds.

The row is stored before; a failure here costs one line on stderr and a bounded time, never a row.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from espalier.harness.errors import UserError, plain, tell_once, unknown_name
from espalier.harness.runs.wandb_marks import MirrorMark
from espalier.harness.settings import Names, Text, choice, read_value
from espalier.harness.specs.comparable import amount
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.specs.secrets import masked, scrub, wandb_keys
from espalier.harness.store import RunDir

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

#: Text options, and the values of `mode`.
TEXTS = ("entity", "project", "group", "job_type", "notes", "resume_from", "fork_from")
MODES = ("online", "offline", "disabled", "shared")

#: Timeouts in seconds for a response of the server and for opening a run.
ANSWER, OPEN = 5.0, 20.0


def check(options: Mapping[str, Any]) -> None:
    """Raise UserError if the wandb package is missing or `wandb.init` lacks an option. Cost: its import."""
    if find_spec("wandb") is None:
        raise UserError("log='wandb' needs the package wandb, which is not installed; valid: none")
    # wandb takes a second to import and need not be installed.
    import wandb

    valid = [name for name in inspect.signature(wandb.init).parameters if name not in RESERVED]
    for name in options:
        if name not in valid:
            raise unknown_name("log.options", name, valid)
    check_values(options)


def check_values(options: Mapping[str, Any]) -> None:
    """Raise UserError if `wandb.init` does not accept an option's value; null means unset."""
    for name, value in _without_nulls(options).items():
        key = f"log.options.{name}"
        if name == "mode":
            choice(key, value, MODES)
        elif name == "tags":
            read_value(key, value, Names)
        elif name in TEXTS:
            read_value(key, value, Text)


def mirror(
    directory: RunDir, config: Mapping[str, Any], spec: RunSpec, group: str | None = None
) -> None:
    """Log a committed run once: config, metrics, answers and row; skipped if this row was logged before.

    A run uses its key as id, so that logging it again does not create a second run. Failures are reported in one line
    on stderr.

    Args:
        directory: of the run with its committed row.
        config: the values that the key was computed from.
        spec: provides the store, options of `wandb.init`, and the number of answers to show.
        group: of a sweep, if the options name none.
    """
    try:
        _mirror(directory, config, spec, group)
    except Exception as error:  # a third-party service can fail in any way, and the row is stored
        line = plain(masked(next(iter(str(error).splitlines()), ""), wandb_keys()))
        print(
            f"log=wandb: run {directory.path.name} was not logged: {type(error).__name__}: {line}; "
            "its row is in the store",
            file=sys.stderr,
            flush=True,
        )
    finally:
        scrub(logs(spec.store / "wandb", directory.path.name), wandb_keys())


def logs(folder: Path, key: str) -> list[Path]:
    """Return wandb's own log files of a run, which can contain responses of servers."""
    places = (
        "*.log",
        f"*run-*-{key}/logs/*",
        f"*run-*-{key}/*.log",
        "cache/logs/**/*",
        "cache/wandb/logs/**/*",
    )
    return [path for place in places for path in folder.glob(place) if path.is_file()]


def group_of(argv: Sequence[str]) -> str:
    """Return the name of a sweep: its identifying command-line words, and a digest to distinguish long ones.

    Words that do not determine the cells are omitted, so that a resumed sweep keeps its name.
    """
    kept = [word for word in argv if not word.lstrip("+~").startswith(NOT_IDENTIFYING)]
    digest = sha256("\n".join(kept).encode()).hexdigest()[:8]
    return f"{' '.join(kept)[:100]} {digest}"


def _mirror(directory: RunDir, config: Mapping[str, Any], spec: RunSpec, group: str | None) -> None:
    mark = MirrorMark.of(spec.store, directory.path.name)
    row = directory.row()
    if row is None or mark.matches(row):
        return
    with mark.locked():
        if mark.matches(row):  # another command logged it meanwhile
            return
        # Remove the rest of a killed command, or the run of an earlier row: a key has one run.
        mark.clear()
        options = {"mode": mode(), "group": group, **_without_nulls(spec.log_options)}
        folder = _log(directory, row, config, spec, options)
        mark.write(row, options["mode"], options.get("project"), options["group"], folder)


def _without_nulls(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _log(
    directory: RunDir,
    row: Mapping[str, Any],
    config: Mapping[str, Any],
    spec: RunSpec,
    options: Mapping[str, Any],
) -> Path:
    """Log one run to wandb and return its folder."""
    # wandb takes a second to import and need not be installed.
    import wandb

    from espalier.harness.runs import wandb_content as content

    with _wandb_folders(spec.store / "wandb"):
        run = wandb.init(
            **options,
            id=row["run_key"],
            name=f"{row['model']} {row['method']} {amount(row)} {row['benchmark']}",
            dir=str(spec.store),
            config=dict(config),
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, init_timeout=OPEN
            ),
        )
        try:
            folder = Path(run.dir).parent
            run.log(content.history(row, directory.journal.entries(), spec.log_samples))
            run.summary.update(dict(row))
            run.log_artifact(content.artifact(directory))
        finally:
            run.finish()
    return folder


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
            os.environ.pop(name, None)


def mode() -> str:
    """Return `online` if a key is set and the server responds, else `offline`."""
    if not os.environ.get("WANDB_API_KEY"):
        return "offline"
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if reachable(address):
        return "online"
    tell_once(
        f"log=wandb: {masked(address, wandb_keys())} does not respond; runs are logged offline, "
        "`python -m espalier wandb` sends them"
    )
    return "offline"


@cache
def reachable(address: str) -> bool:
    """Return whether a server responds at all, through a proxy if one is set. Cost: once, `ANSWER` seconds at most."""

    def connects() -> bool:
        try:
            urlopen(address, timeout=ANSWER).close()
        except HTTPError:
            return True  # a refusal is a response
        except (OSError, ValueError):
            return False
        return True

    # The name lookup has no timeout of its own; after `ANSWER` seconds the thread is abandoned.
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(connects()), daemon=True)
    thread.start()
    thread.join(ANSWER)
    return answers == [True]
